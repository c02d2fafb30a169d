//! Finds the responses of a slot. Readers never wait.
//!
//! The control side renders a VM's record into [`Responses`] and publishes them under the VM's slot. The packet path
//! looks up the slot and gets bytes ready to send. A new record replaces the old one by one pointer swap: an exchange
//! in progress keeps the responses it started with, and readers take no lock. The [`Interner`] stores equal responses
//! of different VMs once.

mod intern;
mod live;
pub mod path;
mod responses;
mod table;

pub use intern::Interner;
pub(crate) use intern::Notation;
pub use live::{Condition, RequestGuard};
pub use live::{LiveOutcome, LiveRequest, LiveRoute, ParkedCall, VmState};
pub use path::{Endpoint, Host, Methods, Route};
pub(crate) use responses::UnrenderedDialects;
pub use responses::{LookupExplanation, RequestLimit, Responses, ResponsesBuilder};
pub use table::RequestHint;
pub use table::{MAX_SLOTS, SlotOutOfRange, SlotState, Store};

use crate::record::Dialect;

/// Dialect name of routes that all dialects share.
pub(crate) const EVERY_DIALECT: &str = "every dialect";

// The dialect of an answer as a small number, so that the packet path can count by array index.

/// Number of a dialect, or one of the special values below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Datasource(u8);

impl Datasource {
    /// No route matched: the record serves nothing at the path.
    pub const NONE: Self = Self(0);
    /// A route that all dialects share, such as `/`.
    pub const ANY: Self = Self(1);
    /// A route of a dialect that records cannot list.
    const OTHER: Self = Self(2);
    const FIRST: usize = 3;

    /// Number of values.
    pub const COUNT: usize = Self::FIRST + Dialect::ALL.len();

    /// Returns the number of a dialect by the name that [`Route::dialect`](Route::dialect) returns.
    #[must_use]
    pub fn named(name: &str) -> Self {
        if name == EVERY_DIALECT {
            return Self::ANY;
        }
        let number = Dialect::ALL.iter().position(|dialect| dialect.as_str() == name);
        let number = number.and_then(|number| u8::try_from(Self::FIRST + number).ok());
        number.map_or(Self::OTHER, Self)
    }

    /// Returns the number, less than [`COUNT`](Self::COUNT).
    #[inline]
    #[must_use]
    pub fn index(self) -> usize {
        self.0.into()
    }

    /// Returns all values in the order of their numbers.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..=u8::MAX).take(Self::COUNT).map(Self)
    }

    /// Returns the name in metrics and in the audit log.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::NONE => "none",
            Self::ANY => "any",
            _ => Dialect::ALL.get(self.index().wrapping_sub(Self::FIRST)).map_or("other", |d| d.as_str()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::Datasource;
    use crate::record::Dialect;

    #[test]
    fn every_dialect_has_a_number_and_a_label_of_its_own() {
        let labels: HashSet<_> = Datasource::all().map(Datasource::label).collect();
        assert_eq!(labels.len(), Datasource::COUNT);
        for dialect in Dialect::ALL {
            assert_eq!(Datasource::named(dialect.as_str()).label(), dialect.as_str());
        }
        assert_eq!(Datasource::named("every dialect").label(), "any");
        assert_eq!(Datasource::named("test").label(), "other");
        assert!(Datasource::all().enumerate().all(|(number, datasource)| datasource.index() == number));
    }
}
