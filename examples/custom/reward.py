"""A reward in ten lines: the share of even digits in a response. `row` has the columns of the data."""


def even_digits(prompt, response, answer, **row):
    """1 for a response of even digits alone."""
    if not response:
        return 0.0
    num_even = sum(character in "02468" for character in response)
    return num_even / len(response)
