"""Verifies tokens as JWT-SVIDs by py-spiffe. INPUT has the bundle, and a list of trust domain, token and audience."""
import json

from spiffe import JwtBundle, JwtSvid, TrustDomain
from spiffe.errors import PySpiffeError

BUNDLE = json.dumps(INPUT["bundle"]).encode()


def judged(domain, token, audience):
    try:
        bundle = JwtBundle.parse(TrustDomain(domain), BUNDLE)
        return str(JwtSvid.parse_and_validate(token, bundle, {audience}).spiffe_id)
    except PySpiffeError as refused:
        return type(refused).__name__


print(json.dumps([judged(*asked) for asked in INPUT["asked"]]))
