//! Where records come from.
//!
//! A feed finds records, reads and checks them, and tells the agent what changed; whatever a source does, a
//! VM keeps the last good record it had.

pub mod contact;
pub mod directory;
#[cfg(feature = "kubevirt")]
pub mod kubevirt;
pub mod libvirt;
#[cfg(feature = "kubevirt")]
pub mod pods;
pub mod registry;
pub mod room;
pub mod snapshot;
pub mod teller;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use metadata_common::mac::Mac;

use crate::room::NoRoom;
use metadata_base::port::PortName;
use metadata_content::record::{Record, RecordError};

/// Why a feed cannot use a record, or anything at all.
#[derive(Clone, Debug, thiserror::Error)]
pub enum FeedError {
    /// The record itself is at fault.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A file or directory cannot be read.
    #[error("{}: expected {expected}: {error}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What the feed wanted of it.
        expected: &'static str,
        /// What the kernel said.
        error: Arc<io::Error>,
    },
    /// A VM cannot be served, or not all of it.
    #[error("{reason}")]
    Vm {
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// There is no memory for the record.
    #[error(transparent)]
    Room(#[from] NoRoom),
    /// A file does not hold what it should.
    #[error("{}: expected {expected}, found {found}; {remedy}", path.display())]
    Content {
        /// Which.
        path: PathBuf,
        /// What was expected.
        expected: String,
        /// What came.
        found: String,
        /// What to do.
        remedy: &'static str,
    },
}

/// What a feed tells.
#[derive(Clone, Debug)]
pub enum FeedEvent {
    /// A record is new or has changed. Its payloads are complete: sources have been read. So have those of its
    /// credentials; one that cannot be read is left out.
    Upsert {
        /// The record's name within the feed.
        key: String,
        /// The record.
        record: Arc<Record>,
    },
    /// A record is to come, and who asks for it is known: their requests wait. It has no say over a record that is in
    /// force, and ends with a later `Upsert`, `Expect` or `Remove` of its key.
    Expect {
        /// The record's name within the feed.
        key: String,
        /// The ports and MACs it will have.
        identities: Vec<(PortName, Mac)>,
    },
    /// A record is gone, or is not expected any more.
    Remove {
        /// The record's name within the feed.
        key: String,
    },
    /// A record cannot be used. An earlier good one stays in force.
    Rejected {
        /// The record's name within the feed.
        key: String,
        /// Why, and what to do.
        error: FeedError,
    },
    /// Everything that was there when the feed started, or when it had to start over, has been told.
    Synced,
}

/// Runs work that waits for a disk or for the kernel on a thread that may wait.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        // The task is never cancelled: what is left is its panic.
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
