//! Collects the ports that the configuration and the records name, and their devices.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io;

use super::super::facts::{PortFacts, RecordFacts};
use crate::agent::preflight::RecordConflicts;
use crate::config::Config;
use metadata_common::port::PortName;
use metadata_content::source::RecordSource;
use metadata_control::status::{AgentStatus, PortState, PortStatus};
use metadata_feed::registry::RecordId;
use metadata_feed::{FeedError, directory};
use metadata_steer::probe::{device, search};

/// Maximum number of invalid records whose errors are kept, of conflicts and of pairs of records of one VM.
const REFUSED_TOLD: usize = 3;

/// Reads the directory of records. Returns a summary of the records, and the ports that the configuration or a valid
/// record names. The summary is `None` if no directory is configured, and empty if the directory cannot be read.
pub(super) fn named(config: &Config) -> (Option<RecordFacts>, BTreeSet<PortName>) {
    let mut ports: BTreeSet<PortName> = config.ports.iter().map(|port| port.name.clone()).collect();
    let records = config.records.as_deref().map(|path| {
        let mut records = RecordFacts::default();
        let (mut claimed, mut owners) =
            (RecordConflicts::new(&config.ports), BTreeMap::<String, String>::new());
        let Ok((dir, names)) = directory::files(path) else { return records };
        for name in names.iter().take(directory::MAX_RECORDS) {
            let Some(loaded) = directory::load(&dir, name, &config.record_limits()) else { continue };
            records.count += 1;
            let lacking = loaded.lacking.iter().map(|reason| format!("{name}: {reason}"));
            records.lacking.extend(lacking.take(REFUSED_TOLD - records.lacking.len()));
            let open = loaded.open_files.into_iter().take(REFUSED_TOLD - records.open_files.len());
            records.open_files.extend(open);
            match loaded.record {
                Ok((record, _)) => {
                    *records.stamps.entry(record.serve.smbios.as_str()).or_default() += 1;
                    let named = record.network.nics.iter().filter_map(|nic| nic.port.as_ref());
                    ports.extend(named.map(PortName::from));
                    claimed.add(&RecordId::new(RecordSource::File, name), &record);
                    let owner = record.owner_text().to_owned();
                    match owners.entry(owner) {
                        Entry::Vacant(place) => _ = place.insert(name.clone()),
                        Entry::Occupied(first) if records.same_vm.len() < REFUSED_TOLD => {
                            let (owner, first) = (first.key().clone(), first.get().clone());
                            records.same_vm.push((first, name.clone(), owner));
                        }
                        Entry::Occupied(_) => {}
                    }
                }
                Err(error) => refuse(&mut records, name, &error),
            }
        }
        records.conflicts = claimed.iter().take(REFUSED_TOLD).collect();
        records
    });
    (records, ports)
}

/// Most ports of the running agent that are examined, those that are not attached first.
const SERVED_MOST: usize = 1_024;

/// The ports of the running agent's records and configuration. Records of sources other than the directory name theirs
/// only there.
pub(super) fn served(status: &AgentStatus) -> Vec<PortName> {
    let wanted = status.ports.listed.iter().filter(|port| port.state != PortState::Closed);
    let mut wanted: Vec<_> = wanted.collect();
    wanted.sort_by_key(|port| port.state == PortState::Attached);
    let name = |port: &PortStatus| match port.name.split_once('@') {
        Some((ifname, netns)) => PortName { ifname: ifname.into(), netns: Some(netns.into()) },
        None => PortName { ifname: port.name.clone(), netns: None },
    };
    wanted.into_iter().take(SERVED_MOST).map(name).collect()
}

/// The ports that the running agent cannot serve, and its reasons.
pub(super) fn in_error(status: &AgentStatus) -> Vec<(String, String)> {
    let ports = status.ports.listed.iter().filter(|port| port.state == PortState::Error).take(SERVED_MOST);
    ports.map(|port| (port.name.clone(), port.reason.clone().unwrap_or_default())).collect()
}

/// Adds an invalid record to the summary.
fn refuse(records: &mut RecordFacts, name: &str, error: &FeedError) {
    if matches!(error, FeedError::Io { error, .. } if error.kind() == io::ErrorKind::PermissionDenied) {
        records.unreadable.get_or_insert_with(|| name.to_owned());
    }
    records.refused_count += 1;
    if records.refused.len() < REFUSED_TOLD {
        records.refused.push((name.to_owned(), error.to_string()));
    }
}

/// Queries the device of each port. If the query finds no device, searches all namespaces for a device with that name.
pub(super) fn look(names: BTreeSet<PortName>) -> Vec<PortFacts> {
    let mut ports: Vec<PortFacts> =
        names.into_iter().map(|name| PortFacts { device: device(&name), name, elsewhere: None }).collect();
    let absent = |port: &PortFacts| !matches!(port.device, Ok(Some(_)));
    let missing: BTreeSet<String> =
        ports.iter().filter(|port| absent(port)).map(|port| port.name.ifname.clone()).collect();
    if missing.is_empty() {
        return ports;
    }
    let mut found = search(&missing);
    for port in ports.iter_mut().filter(|port| absent(port)) {
        // The search is by device name, so ports with the same device name have the same result.
        port.elsewhere = Some(found.entry(port.name.ifname.clone()).or_default().clone());
    }
    ports
}
