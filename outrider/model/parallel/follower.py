"""Ranks 1 to N - 1: they run the steps that rank 0 sends, on their own pages."""

from outrider.model.parallel.member import Member
from outrider.model.parallel.messages import Kind, decode


def follow(member: Member) -> int:
    """Run steps until rank 0 says stop; returns how many.

    What goes wrong here ends the rank, and with its connections the whole group.

    Raises:
        RankLostError: another rank is gone or stands still.
    """
    steps = 0
    while True:
        order = decode(member.group.receive())
        if order.kind is Kind.STOP:
            return steps
        if order.kind is Kind.PULSE:
            member.group.meet()
        else:
            member.follow(order)
            steps += 1
