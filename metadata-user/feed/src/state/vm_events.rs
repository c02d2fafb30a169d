//! The events of VMs: those that operators added, and what guests acknowledged. The next agent goes on with them.

use std::collections::BTreeMap;
use std::io::{self, Cursor};
use std::path::Path;

use metadata_content::record::event::EventList;
use serde::{Deserialize, Serialize};

use crate::state::{StateFileKind, private_file};

/// The file's name in the state directory.
pub const FILE: &str = "events";

/// At most 32 events of about 1 KiB per VM, and only for VMs that have some.
const FORM: StateFileKind = StateFileKind { kind: "events", version: 1, oldest: 1, bytes: 16 << 20 };

/// Events by the owner of the VM's state.
pub type EventsByOwner = BTreeMap<String, EventList>;

#[derive(Serialize, Deserialize)]
struct Line {
    vm: String,
    events: EventList,
}

/// Replaces the file.
///
/// # Errors
/// The error of the first step that fails, or the events of some VMs do not fit; the file is then unchanged.
pub fn write(path: &Path, events: &EventsByOwner) -> io::Result<()> {
    let line = |(vm, events): (&String, &EventList)| {
        Ok(serde_json::to_vec(&Line { vm: vm.clone(), events: events.clone() })?)
    };
    let mut bytes = Vec::new();
    let written = FORM.write(events.iter().map(line), &mut bytes)?;
    if written.left_out > 0 {
        let (most, left_out) = (FORM.bytes, written.left_out);
        return Err(io::Error::other(format!(
            "expected events of at most {most} bytes, found more, of {left_out} VMs; cancel some"
        )));
    }
    FORM.spare_other_version(path)?;
    private_file::replace(path, &bytes)
}

/// Reads the file; no VM has events if there is none.
///
/// # Errors
/// The file is unreadable, damaged, or of another kind.
pub fn read(path: &Path) -> io::Result<EventsByOwner> {
    let mut all = EventsByOwner::new();
    let Some(bytes) = private_file::read(path, FORM.bytes)? else { return Ok(all) };
    let take = |line: &[u8]| {
        let Line { vm, events } = serde_json::from_slice(line).map_err(|_| "a VM and its events")?;
        all.insert(vm, events);
        Ok(())
    };
    FORM.read(Cursor::new(bytes), take).map_err(io::Error::other)?;
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::{EventsByOwner, FILE, FORM, read, write};
    use metadata_content::record::event::VmEvents;
    use std::fs;

    fn sample() -> EventsByOwner {
        let events = VmEvents::default();
        let event = r#"{"id": "drain-1", "kind": "freeze", "not_before": "2030-01-01T00:00:00Z", "description": "drain"}"#;
        let event = serde_json::from_str(event).expect("an event");
        events.add("i", event, 60).expect("room");
        events.acknowledge("drain-1", 60);
        let stored = events.stored().expect("an event was added");
        [("kubevirt/ns/web-1/u".to_owned(), stored)].into()
    }

    #[test]
    fn formats_of_every_release_are_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(FILE);
        write(&path, &sample()).expect("a file");
        golden::check(FILE, FORM.version, &fs::read(&path).expect("bytes"));
        for kept in golden::all(FILE) {
            fs::write(&path, &kept.bytes).expect("a file");
            assert_eq!(read(&path).expect("a table"), sample(), "{}", kept.release);
        }
    }

    #[test]
    fn the_file_reads_back_its_absence_is_an_empty_table_and_a_cut_one_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(FILE);
        assert!(read(&path).expect("no file is no fault").is_empty());
        write(&path, &sample()).expect("a file");
        assert_eq!(read(&path).expect("a table"), sample());
        let bytes = fs::read(&path).expect("bytes");
        fs::write(&path, &bytes[..bytes.len() - 5]).expect("a file");
        read(&path).expect_err("the file is cut");
    }
}
