//! Namespaces named by a process, `/proc/PID/ns/net`: bound to the process that first had the PID.
//!
//! The kernel reuses a PID once its process has ended. The record of a dead VM could then refer to another VM's pod,
//! whose guest would be identified by the MAC in the wrong record. The start time of a process distinguishes it from
//! every other process with its PID (proc(5), `starttime`, in ticks since boot). Unlike a pidfd, it needs no
//! descriptor for each pod.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::MAX_NAMESPACES;
use crate::error::LinkError;

/// Start time of the process behind a namespace, by name of the namespace.
static STARTS: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

/// Start time of the process that a name must refer to, and the number of [`NamespaceReservation`] that require it.
static MEANT: Mutex<BTreeMap<String, (u64, usize)>> = Mutex::new(BTreeMap::new());

/// Index of the start time in `/proc/PID/stat`, counted from the field after the name.
const START_TIME: usize = 19;

/// Reserves a namespace's name for one process until this value is dropped. A caller that has found the process creates
/// it before it passes the name on.
#[derive(Debug)]
pub struct NamespaceReservation {
    name: String,
    process: u32,
    started: u64,
}

impl NamespaceReservation {
    /// Reserves the namespace of the process that has this PID now; `None` if there is none.
    ///
    /// Hold a pidfd of the process and check afterwards that it still runs: otherwise the PID may belong to another
    /// process.
    ///
    /// # Errors
    /// If another user of the name still expects the process that had the PID before. Try again: the error goes away
    /// once that user notices that the process has ended.
    pub fn of(process: u32) -> Result<Option<Self>, LinkError> {
        let name = format!("/proc/{process}/ns/net");
        let Some(now) = started(process) else { return Ok(None) };
        let used = STARTS.lock().unwrap_or_else(PoisonError::into_inner).get(&name).copied();
        let mut meant = MEANT.lock().unwrap_or_else(PoisonError::into_inner);
        if used.or_else(|| meant.get(&name).map(|(first, _)| *first)).is_some_and(|first| first != now) {
            return Err(LinkError::AnotherProcess { name });
        }
        if meant.len() >= MAX_NAMESPACES {
            return Err(LinkError::TooManyNamespaces);
        }
        meant.entry(name.clone()).or_insert((now, 0)).1 += 1;
        Ok(Some(Self { name, process, started: now }))
    }

    /// The name of the namespace, `/proc/PID/ns/net`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Fails once another process has the PID.
    pub fn still(&self) -> Result<(), LinkError> {
        match started(self.process) {
            Some(now) if now != self.started => Err(LinkError::AnotherProcess { name: self.name.clone() }),
            _ => Ok(()),
        }
    }
}

impl Drop for NamespaceReservation {
    fn drop(&mut self) {
        let mut meant = MEANT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, count)) = meant.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                meant.remove(&self.name);
            }
        }
    }
}

/// Fails unless a name refers to the process of its first use, or to the one that a [`NamespaceReservation`] reserves.
///
/// # Errors
/// If the name refers to another process now. A process that has ended is no error: opening the name fails anyway.
pub fn unchanged(path: &Path, name: &str) -> Result<(), LinkError> {
    let Some(now) = process(path).and_then(started) else { return Ok(()) };
    let meant = MEANT.lock().unwrap_or_else(PoisonError::into_inner).get(name).map(|(first, _)| *first);
    if meant.is_some_and(|first| first != now) {
        return Err(LinkError::AnotherProcess { name: name.into() });
    }
    let mut starts = STARTS.lock().unwrap_or_else(PoisonError::into_inner);
    match starts.get(name) {
        Some(first) if *first != now => Err(LinkError::AnotherProcess { name: name.into() }),
        Some(_) => Ok(()),
        None if starts.len() >= MAX_NAMESPACES => Err(LinkError::TooManyNamespaces),
        None => {
            starts.insert(name.into(), now);
            Ok(())
        }
    }
}

/// Forgets the process of a name that is no longer used; the PID may be reused.
pub fn forget(name: &str) {
    STARTS.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
}

/// The PID in `/proc/PID/…`.
fn process(path: &Path) -> Option<u32> {
    let below = path.strip_prefix("/proc").ok()?;
    below.iter().next()?.to_str()?.parse().ok()
}

/// The start time of a process; `None` if there is no such process.
fn started(process: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of the process may contain spaces and brackets.
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').nth(START_TIME)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::STARTS;
    use super::forget;
    use super::process;
    use super::started;
    use super::unchanged;
    use super::{MEANT, NamespaceReservation};
    use crate::error::LinkError;
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
    fn the_start_time_of_a_process_does_not_change() {
        let own = std::process::id();
        assert!(started(own).is_some_and(|at| at > 0 && started(own) == Some(at)));
        assert_eq!(started(u32::MAX), None);
    }

    #[test]
    fn a_name_refers_to_its_first_process_until_it_is_forgotten() {
        let name = format!("/proc/{}/ns/net", std::process::id());
        let path = Path::new(&name);
        unchanged(path, &name).expect("the first");
        unchanged(path, &name).expect("the same");
        // As if the PID had been reused.
        let was = STARTS.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), 1);
        assert!(was.is_some());
        let error = unchanged(path, &name).expect_err("another");
        assert!(matches!(error, LinkError::AnotherProcess { .. }), "{error}");
        forget(&name);
        unchanged(path, &name).expect("named anew");
        forget(&name);
    }

    /// A process that ends with the test.
    struct Sleeper(std::process::Child);

    impl Sleeper {
        fn new() -> (Self, String) {
            let child = std::process::Command::new("sleep").arg("60").spawn().expect("a process");
            let name = format!("/proc/{}/ns/net", child.id());
            (Self(child), name)
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            self.0.kill().and_then(|()| self.0.wait()).expect("it ends");
        }
    }

    #[test]
    fn a_reserved_name_refers_to_no_other_process_before_its_first_use() {
        let (process, name) = Sleeper::new();
        let meant = NamespaceReservation::of(process.0.id()).expect("unused").expect("it runs");
        assert_eq!(meant.name(), name);
        unchanged(Path::new(&name), &name).expect("the reserved process");
        forget(&name);
        // As if the PID had been reused.
        MEANT.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), (1, 1));
        let error = unchanged(Path::new(&name), &name).expect_err("another");
        assert!(matches!(error, LinkError::AnotherProcess { .. }), "{error}");
        let error = NamespaceReservation::of(process.0.id()).expect_err("another");
        assert!(matches!(error, LinkError::AnotherProcess { .. }), "{error}");
        drop(meant);
        unchanged(Path::new(&name), &name).expect("no reservation remains");
        forget(&name);
    }

    #[test]
    fn a_name_in_use_cannot_be_reserved_for_another_process() {
        let (process, name) = Sleeper::new();
        STARTS.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), 1);
        let error = NamespaceReservation::of(process.0.id()).expect_err("in use");
        assert!(matches!(error, LinkError::AnotherProcess { .. }), "{error}");
        forget(&name);
        let (first, second) =
            (NamespaceReservation::of(process.0.id()), NamespaceReservation::of(process.0.id()));
        drop(first.expect("free").expect("it runs"));
        assert!(
            MEANT.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&name),
            "the second holds it"
        );
        drop(second.expect("the same process").expect("it runs"));
        assert!(!MEANT.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&name));
        assert!(NamespaceReservation::of(u32::MAX).expect("no error").is_none(), "no such process");
    }
}
