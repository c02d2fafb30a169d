//! Searches other network namespaces for devices that are not where they were expected.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use metadata_links::netns::{self, Netns};

/// Limit on network namespaces searched.
pub const NAMESPACES_SEARCHED: usize = 2_048;
/// Limit on processes whose namespace is searched.
pub const PROCESSES_SEARCHED: usize = 32_768;
/// Limit on places reported for one name.
pub const PLACES_TOLD: usize = 4;

/// A place where a device of the name exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLocation {
    /// Its namespace as a port may name it; `None` is the agent's own.
    pub netns: Option<String>,
    /// PID and name of a process in that namespace, if the namespace is named through a process.
    pub process: Option<(u32, String)>,
}

/// The result of the search for one name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// The first [`PLACES_TOLD`] places.
    pub places: Vec<DeviceLocation>,
    /// The total number of places.
    pub found: usize,
    /// Namespaces and processes that could not be searched, or exceeded the limits.
    pub unseen: usize,
}

/// Searches for devices in all network namespaces that have a name or a process.
#[must_use]
pub fn search(ifnames: &BTreeSet<String>) -> BTreeMap<String, Search> {
    let (namespaces, mut unseen) = namespaces();
    let mut found: BTreeMap<String, Search> =
        ifnames.iter().map(|name| (name.clone(), Search::default())).collect();
    if ifnames.is_empty() {
        return found;
    }
    for (path, place) in namespaces {
        let inside =
            path.map_or_else(Netns::own, |path| Netns::open(&path.to_string_lossy())).and_then(|netns| {
                netns.run(|| {
                    Ok(ifnames.iter().filter(|name| matches!(netns::index_of(name), Ok(Some(_)))).collect())
                })
            });
        let Ok(inside): Result<Vec<&String>, _> = inside else {
            unseen += 1;
            continue;
        };
        for name in inside {
            let Some(search) = found.get_mut(name) else { continue };
            search.found += 1;
            if search.places.len() < PLACES_TOLD {
                search.places.push(place.clone());
            }
        }
    }
    for search in found.values_mut() {
        search.unseen = unseen;
    }
    found
}

/// Each namespace once: the agent's own, then named ones, then those that only processes have. Also the number of
/// those that could not be identified.
fn namespaces() -> (Vec<(Option<PathBuf>, DeviceLocation)>, usize) {
    let mut seen = BTreeSet::new();
    let mut all = vec![(None, DeviceLocation { netns: None, process: None })];
    let mut unseen = 0;
    if let Ok(own) = fs::metadata(netns::OWN) {
        seen.insert((own.dev(), own.ino()));
    }
    for entry in fs::read_dir(netns::RUN_NETNS).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        note(
            entry.path(),
            DeviceLocation { netns: Some(name), process: None },
            &mut seen,
            &mut all,
            &mut unseen,
        );
    }
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    for (number, pid) in processes.enumerate() {
        let path = format!("/proc/{pid}/ns/net");
        if number >= PROCESSES_SEARCHED {
            unseen += 1;
            continue;
        }
        let called = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let process = Some((pid, called.trim().to_owned()));
        note(
            path.clone().into(),
            DeviceLocation { netns: Some(path), process },
            &mut seen,
            &mut all,
            &mut unseen,
        );
    }
    (all, unseen)
}

fn note(
    path: PathBuf,
    place: DeviceLocation,
    seen: &mut BTreeSet<(u64, u64)>,
    all: &mut Vec<(Option<PathBuf>, DeviceLocation)>,
    unseen: &mut usize,
) {
    match fs::metadata(&path) {
        Ok(file) if !seen.insert((file.dev(), file.ino())) => {}
        Ok(_) if all.len() >= NAMESPACES_SEARCHED => *unseen += 1,
        Ok(_) => all.push((Some(path), place)),
        // It ended meanwhile; other processes in its namespace still lead to that namespace.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(_) => *unseen += 1,
    }
}

#[cfg(test)]
mod tests {
    use super::search;
    use std::collections::BTreeSet;

    #[test]
    fn a_local_device_is_found_once_and_a_missing_one_not_at_all() {
        let names: BTreeSet<String> = ["lo".into(), "no-such-device".into()].into();
        let found = search(&names);
        let own = found["lo"].places.iter().filter(|place| place.netns.is_none()).count();
        assert_eq!((own, found["no-such-device"].found), (1, 0), "{found:?}");
    }
}
