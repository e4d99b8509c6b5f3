"""OpenAI's API: completions, chats, responses, embeddings, files and batches."""
