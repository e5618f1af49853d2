"""The operator's policy for the whole system: what requests get that leave it open.

    outrider:policy   hash: version, rule (coupled | rejection), speculation (on | off),
                      k (auto | fixed:N)

Each change raises `version` by one. Fields of other names are left alone. Coordinators read
the hash with the registry, so a change takes effect within a second, for new sessions.
"""

from dataclasses import dataclass

from outrider.draft_length import parse_draft_length
from outrider.errors import ConfigError
from outrider.messages import AcceptanceRule
from outrider.session.redis import Redis, Script, Value

POLICY_KEY = "outrider:policy"
SWITCH = {"on": True, "off": False}

CHANGE = Script(
    """
local version = tonumber(redis.call('HGET', KEYS[1], 'version')) or 0
redis.call('HSET', KEYS[1], 'version', version + 1, unpack(ARGV))
return 'ok'
"""
)
# Only when it is still gone: somebody may just have written another one.
RESTORE = Script(
    """
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], unpack(ARGV))
end
return 'ok'
"""
)


@dataclass(frozen=True, slots=True)
class Policy:
    """What requests get that leave it open; `version` 0 is the built-in default.

    `k` is the draft length; empty leaves it to the verify workers.
    """

    version: int = 0
    rule: AcceptanceRule = AcceptanceRule.COUPLED
    speculation: bool = True
    k: str = ""


class PolicyStore:
    """Reads and changes the policy.

    Every method raises `RecordsUnavailableError` when Redis does not answer.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def read(self) -> Policy | None:
        """The policy; None when none was ever set.

        Raises:
            ConfigError: somebody wrote a value that means nothing.
        """
        fields = ("version", "rule", "speculation", "k")
        words = await self._redis.command("HMGET", POLICY_KEY, *fields)
        version, rule, speculation, k = (word and word.decode() for word in words)
        if version is None and rule is None and speculation is None and k is None:
            return None
        default = Policy()
        try:
            if k:
                parse_draft_length(k)
            return Policy(
                int(version or 0),
                AcceptanceRule(rule) if rule else default.rule,
                SWITCH[speculation] if speculation else default.speculation,
                k or default.k,
            )
        except (ValueError, KeyError, ConfigError) as error:
            raise ConfigError(
                f"the policy in Redis ({POLICY_KEY}) has a value that means nothing: {error}; "
                "set it again with `outrider policy --rule … --speculation … --k …`"
            ) from error

    async def change(
        self,
        *,
        rule: AcceptanceRule | None = None,
        speculation: bool | None = None,
        k: str | None = None,
    ) -> None:
        """Set what is given and raise the version; at least one must be given.

        `k` is a draft length as `outrider.draft_length` reads it, or empty.
        """
        args: list[Value] = []
        if rule is not None:
            args += ["rule", rule.value]
        if speculation is not None:
            args += ["speculation", "on" if speculation else "off"]
        if k is not None:
            args += ["k", k]
        await self._redis.run(CHANGE, [POLICY_KEY], args)

    async def restore(self, policy: Policy) -> None:
        """Write a policy again that Redis has lost, unless there is another one by now."""
        speculation = "on" if policy.speculation else "off"
        args: list[Value] = ["version", policy.version, "rule", policy.rule.value]
        await self._redis.run(
            RESTORE, [POLICY_KEY], [*args, "speculation", speculation, "k", policy.k]
        )
