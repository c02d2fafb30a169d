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

use crate::error::LinkError;
use crate::netns::MAX_NAMESPACES;

/// When the process started that a namespace is named by, by the namespace's name.
static STARTS: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

/// When the process started that such a name is to mean, and how many [`Meant`] say so.
static MEANT: Mutex<BTreeMap<String, (u64, usize)>> = Mutex::new(BTreeMap::new());

/// Which field of `/proc/PID/stat` says when the process started, counted from the one after its name.
const START_TIME: usize = 19;

/// Holds the name of a process's namespace to that process from before it is used, until dropped: for who has
/// found the process, and tells others its name.
#[derive(Debug)]
pub struct Meant {
    name: String,
    process: u32,
    started: u64,
}

impl Meant {
    /// The namespace of the process that has this number now; `None` when there is none.
    ///
    /// Have a pidfd of the process, and see that it still runs once this has returned: then it is the one.
    ///
    /// # Errors
    /// Somebody still uses the name for the process that had the number before; that ends shortly after they hear
    /// of its end.
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

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Fails once another process has the number.
    pub fn still(&self) -> Result<(), LinkError> {
        match started(self.process) {
            Some(now) if now != self.started => Err(LinkError::AnotherProcess { name: self.name.clone() }),
            _ => Ok(()),
        }
    }
}

impl Drop for Meant {
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

/// Holds a name to the process it meant when it was first used, or is [`Meant`] to mean.
///
/// # Errors
/// The name means another process now. One that has ended is not looked at: then there is nothing to open.
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
    use super::STARTS;
    use super::forget;
    use super::process;
    use super::started;
    use super::unchanged;
    use super::{MEANT, Meant};
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
        assert!(matches!(error, LinkError::AnotherProcess { .. }), "{error}");
        forget(&name);
        unchanged(path, &name).expect("named anew");
        forget(&name);
    }

    /// A process of one's own that ends with the test.
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
    fn a_name_that_is_meant_leads_nowhere_else_before_its_first_use() {
        let (process, name) = Sleeper::new();
        let meant = Meant::of(process.0.id()).expect("unused").expect("it runs");
        assert_eq!(meant.name(), name);
        unchanged(Path::new(&name), &name).expect("the one that is meant");
        forget(&name);
        // As if the number had been given again.
        MEANT.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), (1, 1));
        let error = unchanged(Path::new(&name), &name).expect_err("another");
        assert!(matches!(error, LinkError::AnotherProcess { .. }), "{error}");
        let error = Meant::of(process.0.id()).expect_err("another");
        assert!(matches!(error, LinkError::AnotherProcess { .. }), "{error}");
        drop(meant);
        unchanged(Path::new(&name), &name).expect("nothing is meant by it any more");
        forget(&name);
    }

    #[test]
    fn a_name_that_somebody_uses_is_not_given_another_meaning() {
        let (process, name) = Sleeper::new();
        STARTS.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), 1);
        let error = Meant::of(process.0.id()).expect_err("in use");
        assert!(matches!(error, LinkError::AnotherProcess { .. }), "{error}");
        forget(&name);
        let (first, second) = (Meant::of(process.0.id()), Meant::of(process.0.id()));
        drop(first.expect("free").expect("it runs"));
        assert!(
            MEANT.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&name),
            "the second holds it"
        );
        drop(second.expect("the same process").expect("it runs"));
        assert!(!MEANT.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&name));
        assert!(Meant::of(u32::MAX).expect("no error").is_none(), "no such process");
    }
}
