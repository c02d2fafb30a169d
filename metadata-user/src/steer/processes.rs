//! Namespaces named by a process, `/proc/PID/ns/net`: pinned down to the process that had the number first.
//!
//! A number is given again once its process has ended. What a record says of a VM that is dead could so come to
//! lead into another VM's pod, where its guest would be asked for by this one's MAC. When a process started tells
//! it from every other that has had, or will have, its number (proc(5), `starttime`, in ticks since boot), and
//! costs no descriptor, as a pidfd would for every pod.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use super::SteerError;
use super::netns::MAX_NAMESPACES;

/// When the process started that a namespace is named by, by the namespace's name.
static STARTS: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

/// Which field of `/proc/PID/stat` says when the process started, counted from the one after its name.
const START_TIME: usize = 19;

/// Holds a name to the process it meant when it was first used.
///
/// # Errors
/// The name means another process now. One that has ended is not looked at: then there is nothing to open.
pub(super) fn unchanged(path: &Path, name: &str) -> Result<(), SteerError> {
    let Some(now) = process(path).and_then(started) else { return Ok(()) };
    let mut starts = STARTS.lock().unwrap_or_else(PoisonError::into_inner);
    match starts.get(name) {
        Some(first) if *first != now => Err(SteerError::AnotherProcess { name: name.into() }),
        Some(_) => Ok(()),
        None if starts.len() >= MAX_NAMESPACES => Err(SteerError::TooManyNamespaces),
        None => {
            starts.insert(name.into(), now);
            Ok(())
        }
    }
}

/// Lets a name mean another process: nobody uses it any more.
pub fn forget(name: &str) {
    STARTS.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
}

/// The number in `/proc/PID/…`.
fn process(path: &Path) -> Option<u32> {
    let below = path.strip_prefix("/proc").ok()?;
    below.iter().next()?.to_str()?.parse().ok()
}

/// When a process started, while there is one of this number.
fn started(process: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // Its name may have spaces and brackets in it.
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').nth(START_TIME)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{STARTS, forget, process, started, unchanged};
    use crate::steer::SteerError;
    use std::path::Path;
    use std::sync::PoisonError;

    #[test]
    fn only_numbers_below_proc_are_processes() {
        for (path, number) in [
            ("/proc/4242/ns/net", Some(4242)),
            ("/proc/4242/task/4243/ns/net", Some(4242)),
            ("/proc/self/ns/net", None),
            ("/proc/thread-self/ns/net", None),
            ("/run/netns/4242", None),
        ] {
            assert_eq!(process(Path::new(path)), number, "{path}");
        }
    }

    #[test]
    fn a_process_started_when_it_did() {
        let own = std::process::id();
        assert!(started(own).is_some_and(|at| at > 0 && started(own) == Some(at)));
        assert_eq!(started(u32::MAX), None);
    }

    #[test]
    fn a_name_leads_to_the_process_it_meant_first_until_nobody_uses_it() {
        let name = format!("/proc/{}/ns/net", std::process::id());
        let path = Path::new(&name);
        unchanged(path, &name).expect("the first");
        unchanged(path, &name).expect("the same");
        // As if the number had been given again.
        let was = STARTS.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), 1);
        assert!(was.is_some());
        let error = unchanged(path, &name).expect_err("another");
        assert!(matches!(error, SteerError::AnotherProcess { .. }), "{error}");
        forget(&name);
        unchanged(path, &name).expect("named anew");
        forget(&name);
    }
}
