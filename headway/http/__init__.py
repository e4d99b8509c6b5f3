"""The public port.

entrance    who asks, whether its limits let it, and the way into the gateway, for the gRPC port, too
server      the listener and its connections, with what they may cost
inference   the inference routes, answered on the connection itself
openai      what OpenAI's clients send, and what they take for an answer
oip         the Open Inference Protocol
tasks       a task, polled by its id
public      the ordinary routes: health, tasks, the contract and its page
"""
