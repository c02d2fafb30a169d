//! Guests that ask again and again while something else happens.

use crate::hypervisor::Site;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use testbed::answers::PATHS;
use testbed::guest::Guest;

/// Limit for each request that must be answered, also if it waits for the next agent on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Between two requests of a guest. It leaves time to the hypervisors, which share the processors with their guests.
const PAUSE: Duration = Duration::from_millis(10);
/// How long a request waits that must not be answered: three SYNs.
pub(crate) const SILENCE: Duration = Duration::from_secs(4);

/// Threads of guests that ask.
pub(crate) struct Asking {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<(u64, Vec<String>)>>,
}

/// What all guests got.
#[derive(Debug)]
pub(crate) struct AnswerTally {
    /// Requests answered from the guest's own record.
    pub(crate) answered: u64,
    pub(crate) failures: Vec<String>,
    fewest: u64,
}

impl AnswerTally {
    pub(crate) fn every_guest_was_answered(&self) -> bool {
        self.fewest > 0
    }
}

impl Asking {
    /// Lets every guest of the site ask for its documents in turn.
    pub(crate) fn start(site: &Site) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let guests = site.hypervisors.iter().flat_map(|one| &one.guests);
        let threads = guests.map(|guest| {
            let (guest, stop) = (Arc::clone(guest), Arc::clone(&stop));
            std::thread::spawn(move || ask(&guest, &stop))
        });
        Self { threads: threads.collect(), stop }
    }

    /// Ends the requests.
    pub(crate) fn stop(self) -> AnswerTally {
        self.stop.store(true, Ordering::Relaxed);
        let mut asked = AnswerTally { answered: 0, failures: Vec::new(), fewest: u64::MAX };
        for thread in self.threads {
            let (answered, failures) = thread.join().expect("asking does not panic");
            asked.answered += answered;
            asked.fewest = asked.fewest.min(answered);
            asked.failures.extend(failures);
        }
        println!("{} requests, {} failed", asked.answered, asked.failures.len());
        asked
    }
}

fn ask(guest: &Guest, stop: &AtomicBool) -> (u64, Vec<String>) {
    let (mut answered, mut failures) = (0, Vec::new());
    for path in PATHS.iter().cycle() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        match guest.fetch_own(path, PATIENCE) {
            Ok(_) => answered += 1,
            Err(error) => failures.push(format!("{error:#}")),
        }
        std::thread::sleep(PAUSE);
    }
    (answered, failures)
}
