"""Who is served under load, how soon, and who is refused?"""
