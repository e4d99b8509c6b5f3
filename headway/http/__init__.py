"""HTTP ports.

server             the HTTP/1.1 server: ports and connections
inference          inference routes, answered on the connection itself
openai             OpenAI's API
routing, requests  ordinary routes of a port, their requests and answers
public             ordinary routes of the public port
tasks              GET and DELETE /v1/result/{task_id}
probes             /livez, /readyz and /healthz
openapi            the OpenAPI document at /openapi.json
problem            errors as answers
form               multipart forms
"""
