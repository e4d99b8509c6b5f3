"""Target that weighs a text by its words, and answers each with the number and the weight of the inputs it ran with."""


def words(text: str) -> int:
    return len(text.split())


def together(inputs: list[str]) -> list[list[int]]:
    told = [len(inputs), sum(map(words, inputs))]
    return [told for _ in inputs]
