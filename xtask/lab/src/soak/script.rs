//! The guests' records, and the answers that each guest must get.

use crate::storm::crawl::Dialect;
use crate::storm::guest::{Plan, Planned};
use crate::storm::plan::{Bodies, ask};
use anyhow::{Context as _, Result};
use metadata_content::dialect::render;
use metadata_content::record::RecordLimits;
use metadata_content::store::{Interner, VmState};
use metadata_feed::directory;
use serde_json::{Value, json};
use std::path::Path;
use support::guest::METADATA;
use support::record::{Identity, replace};

/// Requests per second that a record allows its guest. It is high, because crawls follow one another without a pause.
const REQUESTS_PER_SECOND: u32 = 1_000_000;
/// Bytes of user-data, enough for several segments. Each generation of a record has its own.
const USER_DATA: usize = 5_000;

/// The tap of a guest, as its record names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) ifname: String,
    /// The tap's namespace; `None` for the agent's.
    pub(super) netns: Option<String>,
}

/// Returns the record of a guest.
pub(super) fn record(guest: &Identity, generation: u64, place: &Place) -> Result<String> {
    let mut record: Value = serde_json::from_str(&guest.record(generation))?;
    let Place { ifname, netns } = place;
    record["network"]["nics"][0]["port"] = match netns {
        None => json!({"ifname": ifname}),
        Some(netns) => json!({"ifname": ifname, "netns": netns}),
    };
    let name = &guest.hostname;
    let line = format!("# {name}, generation {generation}\n");
    let text = format!("#cloud-config\n{}", line.repeat(USER_DATA / line.len()));
    record["user_data"] = json!({"text": text});
    record["vendor_data"] = json!({"text": "#cloud-config\n{}\n"});
    record["metadata"] = json!({"role": "web"});
    record["admin"] = json!({"user": "alice"});
    record["serve"] = json!({"limits": {"rps": REQUESTS_PER_SECOND, "burst": REQUESTS_PER_SECOND}});
    Ok(record.to_string())
}

/// Replaces a guest's record in one step.
pub(super) fn write(directory: &Path, guest: &Identity, generation: u64, place: &Place) -> Result<()> {
    replace(&guest.path(directory), &record(guest, generation, place)?)
}

/// Returns the requests of these guests and the answers that their current records give. `bodies` is a file that only
/// this plan uses; it is read when the plan is loaded.
pub(super) fn plan(records: &Path, bodies: &Path, dialect: Dialect, guests: &[Identity]) -> Result<Plan> {
    let crawl = dialect.crawl()?;
    let mut bodies = Bodies::create(bodies.to_owned())?;
    let mut planned = Vec::with_capacity(guests.len());
    for guest in guests {
        let name = format!("{}.yaml", guest.hostname);
        let loaded = directory::load(records, &name, &RecordLimits::DEFAULT)
            .with_context(|| format!("{} has no record", guest.hostname))?;
        let (record, _) = loaded.record?;
        let vm = VmState::alone(record.vm.uuid.as_str());
        let responses = render(&record, &mut Interner::new(), vm);
        let (_, answers) = ask(&crawl, guest, &responses, &mut bodies)?;
        planned.push(Planned { mac: guest.mac.0, address: guest.address, answers });
    }
    let requests = crawl.iter().map(|asked| asked.text()).collect();
    Ok(Plan { server: METADATA, requests, bodies: bodies.finish()?, guests: planned })
}
