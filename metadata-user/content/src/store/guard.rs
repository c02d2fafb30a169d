//! What a request must satisfy before it is answered.

use super::live::Call;
use crate::http::Response;
use crate::token::Kind;

/// Something a request must satisfy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// A header field must be there with this value; name and value are compared case-insensitively.
    HeaderIs {
        /// The field's name.
        name: &'static str,
        /// The value wanted.
        value: &'static str,
    },
    /// One of these header fields must be there with its value, compared likewise.
    HeaderIsOneOf(&'static [(&'static str, &'static str)]),
    /// A header field must not be there, not even empty.
    HeaderAbsent {
        /// The field's name.
        name: &'static str,
    },
    /// A header field, where it is there, must hold a token of this VM that has not expired.
    TokenGood {
        /// The field's name.
        name: &'static str,
        /// The dialect's kind of token.
        kind: Kind,
    },
    /// A header field must hold a token of this VM that has not expired.
    TokenNeeded {
        /// The field's name.
        name: &'static str,
        /// The dialect's kind of token.
        kind: Kind,
    },
}

impl Condition {
    /// True when the call satisfies it.
    #[must_use]
    pub fn holds(self, call: &Call<'_>) -> bool {
        let headers = &call.request.headers;
        let is = |(name, value): &(&str, &str)| {
            headers.get(name).is_some_and(|found| found.eq_ignore_ascii_case(value.as_bytes()))
        };
        let good =
            |kind, token: &[u8]| call.vm.keyring.verify(kind, &call.vm.uuid, token, call.now.unix_seconds);
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
    /// True when a request without any header field satisfies it.
    #[must_use]
    pub fn asks_for_nothing(self) -> bool {
        matches!(self, Self::HeaderAbsent { .. } | Self::TokenGood { .. })
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

/// A condition, and the answer to requests that do not meet it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guard {
    /// What must hold.
    pub condition: Condition,
    /// The answer when it does not.
    pub otherwise: Response,
}
