//! The seam between the agent and a source of records.
//!
//! The agent keeps its configured sources as a list of [`Source`]s: it runs them, reports on them, restarts those that a
//! reload concerns, and asks them what they need on the node. Nothing outside a source's own module names it, except its
//! row in [`RecordSource`] and its line in the agent's configuration.

use metadata_common::maps::Slot;
use metadata_content::record::RecordLimits;
use metadata_content::source::RecordSource;
use metadata_content::upstream::Upstream;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::FeedError;
use crate::check::Check;
use crate::publisher::Publisher;
use crate::state::mailboxes::Mailboxes;
use crate::state::save_queue::SaveQueue;

/// The work of a source. It ends when nobody receives its events any more, or with the reason why it cannot go on.
pub type SourceTask = Pin<Box<dyn Future<Output = Result<(), FeedError>> + Send>>;

/// A configured source of records.
pub trait Source: Send + Sync {
    /// Which source this is.
    fn kind(&self) -> RecordSource;

    /// Publishes all records, then [`crate::FeedEvent::Synced`], then changes, until nobody receives them. While the
    /// source is unavailable it removes nothing.
    fn run(&self, context: SourceContext, publisher: Publisher) -> SourceTask;

    /// The platform's own metadata service, which answers what the guests of this source's records ask. The same for the
    /// whole life of the source.
    fn upstream(&self) -> Option<Upstream> {
        None
    }

    /// The directory that the records come from, if they come from one.
    fn directory(&self) -> Option<&Path> {
        None
    }

    /// Tries to read the source once, before the agent starts. Asked only if [`RecordSource::is_in_snapshot`].
    ///
    /// # Errors
    /// The source is unavailable, so that the agent starts with the records of the snapshot.
    fn try_read(&self) -> Result<(), FeedError> {
        Ok(())
    }

    /// How the source can be read now; `None` if there is nothing to say, because it is read only when it changes.
    fn health(&self) -> Option<SourceHealth> {
        None
    }

    /// Checks what the source needs on this node, without serving.
    fn preflight(&self) -> Vec<Check> {
        Vec::new()
    }

    /// A directory with parts of records, which may hold passwords, beside the records themselves.
    fn parts(&self) -> Option<&Path> {
        None
    }

    /// Whether a reload of the configuration reads everything again.
    fn is_reread(&self) -> bool {
        false
    }

    /// Whether the VMs' ports are in other network namespaces.
    fn is_in_namespaces(&self) -> bool {
        false
    }

    /// Whether the source is told how its VMs are served ([`SourceContext::services`]).
    fn follows_services(&self) -> bool {
        false
    }
}

/// What a source gets from the agent.
#[derive(Clone)]
pub struct SourceContext {
    /// Limits of one record.
    pub limits: RecordLimits,
    /// Records of this source are in force already, so that it waits for what it cannot read at startup.
    pub is_patient: bool,
    /// The metadata addresses that the agent serves.
    pub addresses: Vec<IpAddr>,
    /// The directory for files that outlive the agent; `None` if nothing outlives it.
    pub state: Option<PathBuf>,
    /// The queue that writes files of that directory.
    pub saves: SaveQueue,
    /// What the source makes on the node stays when the agent ends, like pinned programs.
    pub stays: bool,
    /// Leaves what the source makes on the node alone while another agent takes over.
    pub pause: TakeoverPause,
    /// How the source's records are served.
    pub services: watch::Receiver<Services>,
    /// What guests have said, of events too.
    pub mailboxes: Arc<Mailboxes>,
    /// Takes the slots whose waiting requests have an answer of [`Source::upstream`].
    pub wakes: UnboundedSender<Vec<Slot>>,
}

/// How a source can be read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SourceHealth {
    /// What is read, such as `/etc/pve/qemu-server`.
    pub reads: String,
    /// Seconds since the first attempt.
    pub asked_for: f64,
    /// Seconds since it was last read whole, or gave a useful answer; `None` before the first time.
    pub answered: Option<f64>,
    /// The party that is asked only when a guest asks, if there is one. It is not part of `reads` and `answered`.
    pub on_demand: Option<OnDemandParty>,
    /// Consecutive failures, if the last attempt failed.
    pub failing: Option<FailureStreak>,
    /// Failures since the start, by kind.
    pub failures: BTreeMap<String, u64>,
    /// Conditions under which it is read nevertheless, such as a cluster without quorum.
    pub notes: Vec<String>,
    /// What an operator should act on: a sentence each, with the remedy.
    pub problems: Vec<String>,
}

/// A party that is asked only when a guest asks, such as OpenStack's Nova.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OnDemandParty {
    /// Its name and address, such as `Nova at http://10.0.0.10:8775`.
    pub name: String,
    /// Seconds since its last answer; `None` before the first.
    pub answered: Option<f64>,
    /// Seconds since it went away, or since the first attempt if it has never answered; 0 while it is not away.
    pub away: f64,
}

/// Consecutive failed attempts to read a source.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FailureStreak {
    /// Seconds since the first of them.
    pub since: f64,
    /// The last failure's kind, such as `forbidden`; empty where failures have no kinds.
    pub kind: String,
    /// The message of the server or the kernel.
    pub reason: String,
}

/// How the agent serves each record of a source, by the record's key.
pub type Services = BTreeMap<String, ServingState>;

/// Where the agent tells a source how its records are served.
pub type ServiceSender = (RecordSource, watch::Sender<Services>);

/// How the agent serves a record, as the node's steering shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServingState {
    /// Programs are attached to all of its ports, and requests of its identities get answers.
    Ready,
    /// A port does not exist yet, or is about to be attached.
    Waiting,
    /// A port cannot be served: the reason. It may pass by itself.
    Failed(String),
    /// It is served, but frames of another guest or MAC arrive on a port: both MACs.
    Mismatched(String),
}

/// How long a source leaves the node alone once another agent is about to take over. A takeover takes seconds; if there
/// is none, this agent goes on.
pub const TAKEOVER_PAUSE: Duration = Duration::from_secs(10);

/// Keeps this agent's sources from making and removing devices while another agent takes over. Their configurations may
/// differ, and each would undo what the other does.
#[derive(Clone, Debug, Default)]
pub struct TakeoverPause(Arc<Mutex<Option<Instant>>>);

impl TakeoverPause {
    /// Begins a pause of [`TAKEOVER_PAUSE`].
    pub fn begin(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now() + TAKEOVER_PAUSE);
    }

    /// Waits for the end of the pause, if there is one.
    pub async fn end(&self) {
        loop {
            let until = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
            match until {
                Some(until) if until > Instant::now() => tokio::time::sleep_until(until).await,
                _ => return,
            }
        }
    }
}
