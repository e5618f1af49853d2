"""How prompts begin that a chat model then writes itself, by kind.

A model that was tuned on conversations writes the user's part too when it is let: after the marks
that begin a user's message it invents one (Xu et al., "Magpie: Alignment Data Synthesis from
Scratch by Prompting Aligned LLMs with Nothing", arXiv 2406.08464). An opening says what kind of
message it is to be. Nothing in here comes from a benchmark.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """Openings of one kind, its share of all prompts, and the tokens that the model adds."""

    name: str
    share: float
    most_tokens: int
    openings: tuple[str, ...]
    # What is put after the model's part.
    closing: str = ""


KINDS = (
    Kind("free", 0.20, 120, ("",)),
    Kind(
        "question",
        0.17,
        24,
        (
            "Who", "Who was the first", "Who wrote", "Who sang", "Who plays", "When did",
            "When was", "When does", "Where is", "Where does", "Where was", "What is the",
            "What are the", "What does", "Which country", "Which", "How many", "How does",
            "How long", "Why do", "Why is", "Is it true that", "What was the name of",
        ),
    ),
    Kind(
        "arithmetic",
        0.14,
        90,
        (
            "A baker makes", "A school has", "Maria has", "Tom buys", "There are", "A bus leaves",
            "Every day Lena", "A farmer sells", "In a library", "Sam earns $", "A recipe needs",
            "If a car", "The price of a", "John and Peter", "A tank holds", "Half of the",
        ),
    ),
    Kind(
        "translation",
        0.13,
        48,
        (
            "Translate into English: Die", "Translate into English: Der",
            "Translate this German sentence to English: Das", "German to English: Ein",
            "Translate from German into English: Wir", "Translate into English: Im Jahr",
            "Translate German to English: Nach", "Translate German to English: In",
            "Translate German to English: Mit", "Translate German to English: Am",
            "Translate German to English: Es", "Translate German to English: Auch",
        ),
    ),
    Kind(
        "summary",
        0.12,
        320,
        (
            "Summarize: ", "Summarize this article:\n\n", "Summarize: The", "Summarize: A",
            "Write a summary of the following news report.\n\n", "Summarize: Police",
            "Give the main points of this text:\n\n", "Summarize: Scientists",
            "Summarize: By", "Summarize: He", "Summarize: London",
        ),
    ),
    Kind(
        "passages",
        0.12,
        300,
        (
            "The history of", "In the second half of the century,", "The species",
            "The city of", "During the war,", "The company was founded", "Some researchers",
            "The album", "The climate of", "The government", "The theory", "Many people",
        ),
        "\n\nAnswer the question with the text above: what is it about, and why?",
    ),
    Kind(
        "task",
        0.12,
        70,
        (
            "Write a", "Write an essay", "Write a short story", "Write a Python function",
            "Explain", "Explain how", "Describe", "Compare", "Pretend to be", "Imagine",
            "Design a", "List", "Suggest", "Help me", "Give me an example", "Implement",
            "Draft an email", "Rewrite the following", "Extract the names", "Create a",
            "Analyze", "What would happen if", "Can you", "Please", "I want to", "Solve",
        ),
    ),
)  # fmt: skip
