"""The public port.

server      the listener and its connections, with what they may cost
inference   the inference routes, answered on the connection itself
openai      what OpenAI's clients send, and what they take for an answer
tasks       a task, polled by its id
probes      whether the process lives, and should get traffic
public      the ordinary routes: health, tasks, the contract and its page
"""
