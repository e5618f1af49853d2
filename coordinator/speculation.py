"""Whether and how a session speculates: what the request says, then what the policy says."""

from outrider import logs, wire
from outrider.draft_length import AUTO, parse_draft_length
from outrider.errors import ConfigError
from outrider.messages import AcceptanceRule, SpeculationOptions
from outrider.pb.v1 import types_pb2
from outrider.session.policy import Policy, PolicyStore


def resolve_speculation(
    asked: types_pb2.SpeculationOptions, policy: Policy, *, trusted_drafts: bool
) -> SpeculationOptions:
    """What a session does, given what its request asks for.

    `trusted_drafts`: a draft worker is up that the operator vouches for. The rejection rule
    is exact only with such ones: their q has to be what they sample from. Where only the
    policy wants it, sessions get the coupled rule instead.

    Raises:
        ConfigError: the request insists on the rejection rule and it would not be exact.
        InvalidRequestError: no such rule.
    """
    enabled = policy.speculation
    if asked.mode != types_pb2.SPECULATION_MODE_UNSPECIFIED:
        enabled = asked.mode == types_pb2.SPECULATION_MODE_ON
    insists = asked.rule != types_pb2.ACCEPTANCE_RULE_UNSPECIFIED
    rule = wire.rule_from_pb(asked.rule) if insists else policy.rule
    if rule is AcceptanceRule.REJECTION and enabled and not trusted_drafts:
        if insists:
            raise ConfigError(
                "the rejection rule is only exact with a draft worker that the operator trusts, "
                "and none is up; start the coordinator with --trust-draft-worker ID, or use the "
                "coupled rule"
            )
        rule = AcceptanceRule.COUPLED
    if asked.draft_len or asked.auto_draft_len:
        return SpeculationOptions(enabled, asked.draft_len, rule, asked.auto_draft_len)
    fixed = parse_draft_length(policy.k) if policy.k else 0
    return SpeculationOptions(enabled, fixed, rule, policy.k == AUTO)


class CurrentPolicy:
    """The policy as this coordinator last read it."""

    def __init__(self, store: PolicyStore) -> None:
        self.value = Policy()
        self._store = store
        self._refused = ""
        self._log = logs.get(__name__)

    async def refresh(self) -> None:
        """Read it again; one that means nothing is logged once and the last one stays.

        A Redis that came back empty gets the last one back.

        Raises:
            RecordsUnavailableError: Redis does not answer.
        """
        try:
            found = await self._store.read()
        except ConfigError as error:
            if error.message != self._refused:
                self._log.error("keeping the last policy", error=error.message)
            self._refused = error.message
            return
        self._refused = ""
        if found is None:
            if self.value.version:
                await self._store.restore(self.value)
            return
        if found != self.value:
            self._log.info(
                "policy",
                version=found.version,
                rule=found.rule.value,
                speculation=found.speculation,
                k=found.k,
            )
        self.value = found
