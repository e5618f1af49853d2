"""The operator's policy for the whole system: what requests get that leave it open.

    outrider:policy   hash: version, rule (coupled | rejection), speculation (on | off)

Each change raises `version` by one. Fields of other names are left alone. Coordinators read
the hash with the registry, so a change takes effect within a second, for new sessions.
"""

from dataclasses import dataclass

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
    """What requests get that leave it open; `version` 0 is the built-in default."""

    version: int = 0
    rule: AcceptanceRule = AcceptanceRule.COUPLED
    speculation: bool = True


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
        words = await self._redis.command("HMGET", POLICY_KEY, "version", "rule", "speculation")
        version, rule, speculation = (word and word.decode() for word in words)
        if version is None and rule is None and speculation is None:
            return None
        default = Policy()
        try:
            return Policy(
                int(version or 0),
                AcceptanceRule(rule) if rule else default.rule,
                SWITCH[speculation] if speculation else default.speculation,
            )
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"the policy in Redis ({POLICY_KEY}) has a value that means nothing: {error}; "
                "set it again with `outrider policy --rule … --speculation …`"
            ) from error

    async def change(
        self, *, rule: AcceptanceRule | None = None, speculation: bool | None = None
    ) -> None:
        """Set what is given and raise the version; at least one must be given."""
        args: list[Value] = []
        if rule is not None:
            args += ["rule", rule.value]
        if speculation is not None:
            args += ["speculation", "on" if speculation else "off"]
        await self._redis.run(CHANGE, [POLICY_KEY], args)

    async def restore(self, policy: Policy) -> None:
        """Write a policy again that Redis has lost, unless there is another one by now."""
        speculation = "on" if policy.speculation else "off"
        args: list[Value] = ["version", policy.version, "rule", policy.rule.value]
        await self._redis.run(RESTORE, [POLICY_KEY], [*args, "speculation", speculation])
