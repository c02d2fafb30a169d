//! Finds the responses of a slot. Readers never wait.
//!
//! The control side renders a VM's record into [`Responses`] and publishes them under the VM's slot. The packet path
//! looks up the slot and gets bytes ready to send. A new record replaces the old one by one pointer swap: an exchange
//! in progress keeps the responses it started with, and readers take no lock. The [`Interner`] stores equal responses
//! of different VMs once.

mod ahead;
mod datasource;
mod guard;
mod intern;
mod live;
pub mod path;
mod responses;
mod route;
mod table;

pub use ahead::Hint;
pub use datasource::Datasource;
pub use guard::{Condition, Guard};
pub use intern::Interner;
pub(crate) use intern::Notation;
pub use live::{Call, Live, Outcome, Parked, Vm};
pub use path::Host;
pub(crate) use responses::Unrendered;
pub use responses::{Explained, RequestLimit, Responses, ResponsesBuilder};
pub use route::{Endpoint, Methods, Route};
pub use table::{Entry, MAX_SLOTS, SlotOutOfRange, Store};

/// Dialect name of routes that all dialects share.
pub(crate) const EVERY_DIALECT: &str = "every dialect";
