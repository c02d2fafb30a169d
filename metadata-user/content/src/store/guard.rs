//! Conditions that a request must satisfy before its route answers it.

use super::live::LiveRequest;
use crate::http::Response;
use crate::token::TokenKind;

/// A condition on a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// A header field must have this value. Name and value are compared case-insensitively.
    HeaderIs {
        /// Field name.
        name: &'static str,
        /// Required value.
        value: &'static str,
    },
    /// At least one of these header fields must have its value, compared case-insensitively.
    HeaderIsOneOf(&'static [(&'static str, &'static str)]),
    /// A header field must be absent; an empty one counts as present.
    HeaderAbsent {
        /// Field name.
        name: &'static str,
    },
    /// A header field must be absent, or contain a token of this VM that has not expired.
    TokenGood {
        /// Field name.
        name: &'static str,
        /// Kind of token, one per dialect.
        kind: TokenKind,
    },
    /// A header field must contain a token of this VM that has not expired.
    TokenNeeded {
        /// Field name.
        name: &'static str,
        /// Kind of token, one per dialect.
        kind: TokenKind,
    },
}

impl Condition {
    /// Returns whether the call satisfies the condition.
    #[must_use]
    pub fn holds(self, call: &LiveRequest<'_>) -> bool {
        let headers = &call.request.headers;
        let is = |(name, value): &(&str, &str)| {
            headers.get(name).is_some_and(|found| found.eq_ignore_ascii_case(value.as_bytes()))
        };
        let good =
            |kind, token: &[u8]| call.vm.keyring.verify(kind, &call.vm.owner, token, call.now.unix_seconds);
        match self {
            Self::HeaderIs { name, value } => is(&(name, value)),
            Self::HeaderIsOneOf(fields) => fields.iter().any(is),
            Self::HeaderAbsent { name } => !headers.contains(name),
            Self::TokenGood { name, kind } => headers.get(name).is_none_or(|token| good(kind, token)),
            Self::TokenNeeded { name, kind } => headers.get(name).is_some_and(|token| good(kind, token)),
        }
    }
}

impl Condition {
    /// Returns whether a request without any header field satisfies the condition.
    #[must_use]
    pub fn asks_for_nothing(self) -> bool {
        matches!(self, Self::HeaderAbsent { .. } | Self::TokenGood { .. })
    }

    /// Returns what a request must have, or must not have, to satisfy the condition.
    #[must_use]
    pub fn demand(self) -> String {
        match self {
            Self::HeaderIs { name, value } => format!("the field `{name}: {value}`"),
            Self::HeaderIsOneOf(fields) => {
                let fields: Vec<_> =
                    fields.iter().map(|(name, value)| format!("`{name}: {value}`")).collect();
                format!("the field {}", fields.join(" or "))
            }
            Self::HeaderAbsent { name } => format!("no field `{name}`"),
            Self::TokenGood { name, .. } => format!("no field `{name}`, or a valid token in it"),
            Self::TokenNeeded { name, .. } => format!("a valid token in the field `{name}`"),
        }
    }
}

impl std::fmt::Display for Condition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::HeaderIs { name, value } => write!(f, "needs {name}: {value}"),
            Self::HeaderIsOneOf(fields) => {
                for (n, (name, value)) in fields.iter().enumerate() {
                    write!(f, "{} {name}: {value}", if n == 0 { "needs" } else { " or" })?;
                }
                Ok(())
            }
            Self::HeaderAbsent { name } => write!(f, "refused with {name}"),
            Self::TokenGood { name, .. } => write!(f, "refused with a bad {name}"),
            Self::TokenNeeded { name, .. } => write!(f, "needs {name}"),
        }
    }
}

/// A condition, and the answer to requests that do not satisfy it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestGuard {
    /// Condition on the request.
    pub condition: Condition,
    /// Answer if the condition does not hold.
    pub otherwise: Response,
}
