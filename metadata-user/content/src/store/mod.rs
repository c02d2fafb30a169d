//! Slot to responses; readers never wait.
//!
//! The control side renders a VM's record into [`Responses`] and publishes them under the VM's slot; the
//! packet path looks the slot up and gets bytes ready to send. A record is replaced by swapping one
//! pointer, so an exchange in flight keeps what it started with and a reader never meets a lock. The
//! [`Interner`] makes equal responses of different VMs one allocation.

mod datasource;
mod guard;
mod intern;
mod live;
pub mod path;
mod responses;
mod table;

pub use datasource::Datasource;
pub use guard::{Condition, Guard};
pub use intern::Interner;
pub(crate) use intern::Notation;
pub use live::{Call, Live, Outcome, Parked, Vm};
pub use path::Host;
pub use responses::{Endpoint, Explained, Methods, RequestLimit, Responses, ResponsesBuilder, Route};
pub use table::{Entry, MAX_SLOTS, SlotOutOfRange, Store};

/// What a route is of that no dialect has for itself.
pub(crate) const EVERY_DIALECT: &str = "every dialect";
