//! The live view of a node: `xdp-imds top`, and the page at `/` of the metrics address.
//!
//! The agent answers `GET /v1/top` on its control socket with a [`Top`] as JSON, and `?guest=NAME` with a list of
//! [`VmPage`]. A new version may add fields, but no field changes its meaning within [`SCHEMA`]. Of a record it shows
//! only names and addresses; a path is shown without its query.

use std::collections::BTreeMap;
use std::path::Path;

use metadata_content::record::event::AnnouncedEvent;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::status::{self, ClientError, GuestUsage, Phase, WorkerStatus};

/// The version of the format. It increases when a field changes its meaning or is removed.
pub const SCHEMA: &str = "top/1";
/// Number of VMs that one answer lists by default.
pub const LISTED: usize = 64;
/// Limit on the number of VMs that one answer lists.
pub const LISTED_MOST: usize = 512;
/// Limit on a filter or on the name of a VM, in bytes.
pub const WORDS_MOST: usize = 256;
/// Limit on [`Traffic::history`], in seconds.
pub const HISTORY: usize = 60;

/// What a question for a [`Top`] names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct TopQuery {
    /// Number of VMs to list, [`LISTED`] by default and at most [`LISTED_MOST`].
    pub limit: Option<usize>,
    /// Their order.
    pub sort: VmOrder,
    /// List only VMs with this text in their name, UUID, port, MAC, dialect or stage.
    pub filter: String,
    /// Show the pages of the VMs of this name instead: a port, a MAC, a VM's name or UUID, or its record.
    pub guest: Option<String>,
}

impl TopQuery {
    /// The path and query of the request.
    #[must_use]
    pub fn path(&self) -> String {
        let Self { limit, sort, filter, guest } = self;
        let mut query = form_urlencoded::Serializer::new(String::new());
        query.append_pair("sort", sort.name());
        if let Some(limit) = limit {
            query.append_pair("limit", &limit.to_string());
        }
        if !filter.is_empty() {
            query.append_pair("filter", filter);
        }
        if let Some(guest) = guest {
            query.append_pair("guest", guest);
        }
        format!("/v1/top?{}", query.finish())
    }

    /// Number of VMs to list.
    #[must_use]
    pub fn most(&self) -> usize {
        self.limit.unwrap_or(LISTED).min(LISTED_MOST)
    }
}

/// Asks the agent of a run directory. `T` is [`Top`], or a list of [`VmPage`] for a query with `guest`.
///
/// # Errors
/// [`ClientError`] without an answer, or with one that this version cannot read.
pub fn fetch<T: DeserializeOwned>(run: &Path, query: &TopQuery) -> Result<T, ClientError> {
    let bytes = status::get(run, &query.path())?;
    serde_json::from_slice(&bytes).map_err(|error| ClientError::Mute(error.into()))
}

/// The order of VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VmOrder {
    /// Those that boot come first: those that wait for their record or whose port is in error, then the one whose boot
    /// began most recently. Those that have not asked follow, and at last those that are off.
    #[default]
    Newest,
    /// Most requests first.
    Requests,
    /// Most failed requests first.
    Failed,
    /// By stage: those that wait come first, those that are off come last.
    Stage,
    /// By name.
    Name,
}

impl VmOrder {
    /// Every order.
    pub const ALL: [Self; 5] = [Self::Newest, Self::Requests, Self::Failed, Self::Stage, Self::Name];

    /// Its name in a query.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Newest => "newest",
            Self::Requests => "requests",
            Self::Failed => "failed",
            Self::Stage => "stage",
            Self::Name => "name",
        }
    }

    /// The next order, as a key chooses it.
    #[must_use]
    pub fn next(self) -> Self {
        let at = Self::ALL.iter().position(|sort| *sort == self).unwrap_or_default();
        Self::ALL[(at + 1) % Self::ALL.len()]
    }
}

/// The live view of a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Top {
    /// [`SCHEMA`].
    pub schema: String,
    /// The agent's version.
    pub version: String,
    /// The name of the node's kernel (uname(2)).
    pub node: String,
    /// Seconds since the agent started.
    pub uptime: f64,
    /// The phase of the agent's life.
    pub phase: Phase,
    /// Seconds since the agent began to follow guests for viewers. It forgets what guests asked before.
    pub followed: f64,
    /// Problems that need an operator, a line each, as in `status`.
    pub troubles: Vec<String>,
    /// Requests.
    pub traffic: Traffic,
    /// How long answers took in the last seconds; `None` if there were none.
    pub latency: Option<LatencyFigures>,
    /// Requests that wait now, by reason: `record`, `rate` or `change`.
    pub parked: BTreeMap<String, u64>,
    /// Frames and requests that were dropped since the start, by reason; the reason that grows fastest comes first.
    pub drops: Vec<DropCount>,
    /// The workers, one for each hub.
    pub workers: Vec<WorkerStatus>,
    /// Number of VMs by stage, all of the node.
    pub stages: BTreeMap<BootStage, u64>,
    /// The listed VMs.
    pub vms: Vec<VmRow>,
    /// Number of VMs that match the filter.
    pub matching: u64,
}

/// Requests of all VMs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Traffic {
    /// Requests answered since the start.
    pub requests: u64,
    /// Requests answered each second, lately; `None` in the first second.
    pub per_second: Option<f64>,
    /// Of these, answers with a status of 429 or at least 500.
    pub failed_per_second: Option<f64>,
    /// Requests in each of the last seconds, the newest last; at most [`HISTORY`].
    pub history: Vec<u64>,
}

/// Quantiles of the time from a request's last byte until TCP has its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyFigures {
    /// Seconds that the figures cover.
    pub over: f64,
    /// Number of answers.
    pub answers: u64,
    /// Upper bound of half of them, in microseconds; `None` if it is beyond the largest bucket.
    pub p50_us: Option<u64>,
    /// Upper bound of 90 % of them.
    pub p90_us: Option<u64>,
    /// Upper bound of 99 % of them.
    pub p99_us: Option<u64>,
    /// Upper bound of all.
    pub most_us: Option<u64>,
}

/// One reason for drops.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DropCount {
    /// The reason, as in the metrics and in `status`.
    pub reason: String,
    /// Number since the start.
    pub count: u64,
    /// Number each second, lately.
    pub per_second: f64,
}

/// How far the boot of a VM is, as the agent sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BootStage {
    /// Its port is not attached.
    Unattached,
    /// Its record has not arrived; its requests are held.
    Unrecorded,
    /// It sends requests.
    Asking,
    /// It has sent requests, and has been quiet for [`QUIET_AFTER`] seconds.
    Quiet,
    /// It has sent no request since it is followed.
    #[default]
    Silent,
    /// Its record is gone; it gets no answer, and 404 on a connection that is still open.
    Gone,
}

/// Seconds without a request after which a VM is [`BootStage::Quiet`].
pub const QUIET_AFTER: f64 = 3.0;

impl BootStage {
    /// Every stage.
    pub const ALL: [Self; 6] =
        [Self::Unattached, Self::Unrecorded, Self::Asking, Self::Quiet, Self::Silent, Self::Gone];

    /// Its name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unattached => "unattached",
            Self::Unrecorded => "unrecorded",
            Self::Asking => "asking",
            Self::Quiet => "quiet",
            Self::Silent => "silent",
            Self::Gone => "gone",
        }
    }
}

/// A NIC of a VM, which is a MAC on a port.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VmRow {
    /// The VM's name, from the record.
    pub vm: Option<String>,
    /// The VM's UUID, from the record.
    pub uuid: Option<String>,
    /// The port.
    pub port: String,
    /// The MAC.
    pub mac: String,
    /// How far its boot is.
    pub stage: BootStage,
    /// What it waits for.
    pub waits_for: Option<String>,
    /// The datasource that the guest has found: the dialect that first answered with success while it was followed,
    /// else those that it asked for before.
    pub dialect: Option<String>,
    /// Somebody needs to act before its port can be attached. False for a VM that is off: its port has no interface.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub port_error: bool,
    /// Seconds since the first request that was seen.
    pub first: Option<f64>,
    /// Seconds since the first request of its last boot: the first one after a minute without any, or the first one for
    /// user-data after a minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<f64>,
    /// Seconds since the last request.
    pub last: Option<f64>,
    /// Requests that were seen.
    pub requests: u64,
    /// Of these, answers with a status of 429 or at least 500.
    pub failed: u64,
    /// The guest has got its user-data.
    pub has_user_data: bool,
    /// The path of the last request, without its query.
    pub path: Option<String>,
    /// The status of the last answer.
    pub status: Option<u16>,
}

impl VmRow {
    /// What people call it: its name, else its MAC.
    #[must_use]
    pub fn name(&self) -> &str {
        self.vm.as_deref().unwrap_or(&self.mac)
    }
}

/// One VM's page.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VmPage {
    /// The line of the list.
    pub row: VmRow,
    /// Its record.
    pub record: Option<String>,
    /// Its slot on the node.
    pub slot: Option<u32>,
    /// The hub that serves it.
    pub hub: Option<u32>,
    /// The program that steers its port.
    pub program: Option<String>,
    /// What its worker holds for it; `None` if it is not served or the worker is silent.
    pub held: Option<GuestUsage>,
    /// Events of its VM that are scheduled or have begun.
    #[serde(default)]
    pub events: Vec<AnnouncedEvent>,
    /// Its last requests, the newest first.
    pub requests: Vec<SeenRequest>,
}

/// A request that was answered.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SeenRequest {
    /// Seconds since then.
    pub ago: f64,
    /// The method.
    pub method: String,
    /// The path, without its query.
    pub path: String,
    /// The dialect that answered.
    pub dialect: String,
    /// The HTTP status.
    pub status: u16,
    /// Bytes of the body.
    pub bytes: u64,
    /// Microseconds from the turn that received the last byte until TCP had the answer.
    pub us: u64,
}
