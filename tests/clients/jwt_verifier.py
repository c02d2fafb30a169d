"""Verifies tokens against a JWK Set as a relying party does. INPUT has the set, the issuer and the tokens."""
import json

import jwt

SET = jwt.PyJWKSet.from_dict(INPUT["jwks"])


def judged(token, audience):
    try:
        key = SET[jwt.get_unverified_header(token)["kid"]]
        return jwt.decode(
            token,
            key,
            algorithms=[key.algorithm_name],
            audience=audience,
            issuer=INPUT["issuer"],
            options={"require": ["aud", "exp", "iat", "iss", "jti", "nbf", "sub"]},
        )
    except (KeyError, jwt.PyJWTError) as refused:
        return type(refused).__name__


print(json.dumps([judged(token, audience) for token, audience in INPUT["tokens"]]))
