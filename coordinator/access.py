"""Who may make which call, and for which tenant.

With tokens, the token of a call decides both. Without them, whoever can connect may do everything,
for the tenant that the call names.
"""

from coordinator.calls import TENANT, Context, named_tenant, read_metadata
from outrider.errors import PermissionDeniedError, UnauthenticatedError
from outrider.tokens import Holder, Role, TokenFiles

AUTHORIZATION = "authorization"
SERVICE = "/outrider.v1.CoordinatorService/"
# What every tenant may call; everything else is for admins.
TENANT_CALLS = frozenset({"Generate", "Resume", "Cancel", "GetSession", "ListModels"})


class Access:
    """Knows tenants and rights; None for `tokens` lets everybody in."""

    def __init__(self, tokens: TokenFiles | None) -> None:
        self._tokens = tokens

    def check(self, method: str, context: Context) -> None:
        """Refuse a call without a token that is good for it.

        Raises:
            UnauthenticatedError: there is no token, or a wrong one.
            PermissionDeniedError: the call is for admins, or names another tenant.
        """
        if self._tokens is None:
            return
        holder = self._holder(self._tokens, context)
        for_tenants = method.startswith(SERVICE) and method.removeprefix(SERVICE) in TENANT_CALLS
        if holder.role is not Role.ADMIN and not for_tenants:
            raise PermissionDeniedError(f"{method} needs a token of the role {Role.ADMIN.value}")

    def tenant_of(self, context: Context) -> str:
        """On whose behalf the call is made; "" is a tenant like any other.

        Raises:
            InvalidRequestError: the call names what can't be a tenant.
            UnauthenticatedError: there is no token, or a wrong one.
            PermissionDeniedError: the call names another tenant.
        """
        if self._tokens is None:
            return named_tenant(context)
        return self._holder(self._tokens, context).tenant

    def _holder(self, tokens: TokenFiles, context: Context) -> Holder:
        scheme, _, token = read_metadata(context, AUTHORIZATION).partition(" ")
        if not token or scheme.lower() != "bearer":
            raise UnauthenticatedError(
                f"a token is needed: metadata `{AUTHORIZATION}: Bearer TOKEN`, in the SDK `token`, "
                "in the command OUTRIDER_TOKEN"
            )
        holder = tokens.find(token.strip())
        if holder is None:
            raise UnauthenticatedError("the token is not one of this service, or not any more")
        if named_tenant(context) not in ("", holder.tenant):
            raise PermissionDeniedError(f"the token is not of the tenant that {TENANT} names")
        return holder
