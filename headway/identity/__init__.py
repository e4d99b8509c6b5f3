"""Authentication: one package or file for each way of knowing the principal of a request.

anonymous    one principal for everybody
api_keys     API keys, from a store or a file
jwt          JSON Web Tokens
combined     keys and tokens side by side
model_limits limits of a credential for single models
principals   principals made from a credential's data
"""
