//! Where devices of a name are, when they are not where they were said to be.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use metadata_links::netns::{self, Netns};

/// Network namespaces looked into at most.
pub const NAMESPACES_SEARCHED: usize = 2_048;
/// Processes whose namespace is looked at, at most.
pub const PROCESSES_SEARCHED: usize = 32_768;
/// Places told of one name, at most.
pub const PLACES_TOLD: usize = 4;

/// Where a device of that name is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its namespace as a port may name it; `None` is the agent's own.
    pub netns: Option<String>,
    /// A process in that namespace and what it is called, where one was needed to name it.
    pub process: Option<(u32, String)>,
}

/// What a search for one name found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// The first [`PLACES_TOLD`].
    pub places: Vec<Place>,
    /// How many there were.
    pub found: usize,
    /// Namespaces and processes that could not be looked into, or were beyond the limits.
    pub unseen: usize,
}

/// Looks for devices in all network namespaces that have a name or a process.
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

/// Each namespace once: the agent's own, then those with a name, then those that only processes have. And how
/// many could not be told.
fn namespaces() -> (Vec<(Option<PathBuf>, Place)>, usize) {
    let mut seen = BTreeSet::new();
    let mut all = vec![(None, Place { netns: None, process: None })];
    let mut unseen = 0;
    if let Ok(own) = fs::metadata(netns::OWN) {
        seen.insert((own.dev(), own.ino()));
    }
    for entry in fs::read_dir(netns::RUN_NETNS).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        note(entry.path(), Place { netns: Some(name), process: None }, &mut seen, &mut all, &mut unseen);
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
        note(path.clone().into(), Place { netns: Some(path), process }, &mut seen, &mut all, &mut unseen);
    }
    (all, unseen)
}

fn note(
    path: PathBuf,
    place: Place,
    seen: &mut BTreeSet<(u64, u64)>,
    all: &mut Vec<(Option<PathBuf>, Place)>,
    unseen: &mut usize,
) {
    match fs::metadata(&path) {
        Ok(file) if !seen.insert((file.dev(), file.ino())) => {}
        Ok(_) if all.len() >= NAMESPACES_SEARCHED => *unseen += 1,
        Ok(_) => all.push((Some(path), place)),
        // It ended meanwhile; its namespace, if others have it, is found by them.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(_) => *unseen += 1,
    }
}

#[cfg(test)]
mod tests {
    use super::search;
    use std::collections::BTreeSet;

    #[test]
    fn a_device_of_ones_own_namespace_is_found_once_and_one_of_nowhere_not_at_all() {
        let names: BTreeSet<String> = ["lo".into(), "no-such-device".into()].into();
        let found = search(&names);
        let own = found["lo"].places.iter().filter(|place| place.netns.is_none()).count();
        assert_eq!((own, found["no-such-device"].found), (1, 0), "{found:?}");
    }
}
