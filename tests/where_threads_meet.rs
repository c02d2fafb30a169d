//! Where threads meet without a lock, no order of their steps that the memory model allows loses anything.
//!
//! The code is the agent's own, file by file; only its atomics are loom's, which run a model once for each order
//! (bounded by preemptions) and each value a load may see.

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};
}

#[path = "../metadata-user/datapath/src/afxdp/all_sent/cell.rs"]
mod cell;
#[path = "../metadata-user/datapath/src/worker/told.rs"]
mod told;

use loom::sync::atomic::AtomicUsize;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use metadata_common::maps::AllSent;
use metadata_datapath::stack::{Displaced, Heard};

use cell::Cell;
use sync::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use told::Told;

/// Times a thread may be interrupted where it need not wait: three find what is known to be findable here, and
/// more take minutes.
const PREEMPTIONS: usize = 3;

fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(f);
}

/// An eventfd: it stays rung until it is heard.
#[derive(Debug, Default)]
struct Bell {
    rung: Mutex<bool>,
    ring: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock().expect("nobody panics with it") = true;
        self.ring.notify_one();
    }

    /// Sleeps until it is rung, and hears it.
    fn wait(&self) {
        let mut rung = self.rung.lock().expect("nobody panics with it");
        while !*rung {
            rung = self.ring.wait(rung).expect("nobody panics with it");
        }
        *rung = false;
    }
}

/// A queue with no more order than it needs: each message is there for whoever sees it.
#[derive(Debug)]
struct Queue<const N: usize>([AtomicUsize; N]);

impl<const N: usize> Queue<N> {
    fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicUsize::new(0)))
    }

    fn send(&self, at: usize) {
        self.0[at].store(at + 1, Ordering::Release);
    }

    /// The message at this place, if it can be seen.
    fn receive(&self, at: usize) -> Option<usize> {
        self.0.get(at)?.load(Ordering::Acquire).checked_sub(1)
    }
}

/// The control side and a worker of [`metadata_datapath::worker`].
#[derive(Debug)]
struct Shared<const N: usize> {
    told: Told,
    queue: Queue<N>,
    bell: Bell,
}

/// The worker's loop, less everything but what it is told: at most `batch` messages a turn, then sleep.
fn hear_all<const N: usize>(shared: &Shared<N>, batch: usize) {
    let mut heard = 0;
    while heard < N {
        let mut taken = 0;
        if shared.told.take() {
            while taken < batch && shared.queue.receive(heard) == Some(heard) {
                (heard, taken) = (heard + 1, taken + 1);
            }
            if taken == batch {
                shared.told.keep();
            }
        }
        if heard < N && taken < batch {
            shared.bell.wait();
        }
    }
}

fn every_message_is_heard<const N: usize>(batch: usize) {
    model(move || {
        let shared = Arc::new(Shared::<N> { told: Told::new(), queue: Queue::new(), bell: Bell::default() });
        let its = Arc::clone(&shared);
        let teller = thread::spawn(move || {
            for message in 0..N {
                its.queue.send(message);
                its.told.tell();
                its.bell.ring();
            }
        });
        // A message that is missed leaves the worker asleep for ever, which loom calls a deadlock.
        hear_all(&shared, batch);
        teller.join().expect("the teller");
    });
}

#[test]
fn a_worker_receives_every_message_and_never_sleeps_through_one() {
    every_message_is_heard::<1>(1);
    every_message_is_heard::<2>(2);
}

#[test]
fn a_worker_that_takes_one_message_per_turn_receives_all() {
    every_message_is_heard::<2>(1);
}

#[test]
fn messages_of_two_concurrent_senders_are_both_received() {
    model(|| {
        let shared = Arc::new(Shared::<2> { told: Told::new(), queue: Queue::new(), bell: Bell::default() });
        let tellers = [0, 1].map(|message| {
            let its = Arc::clone(&shared);
            thread::spawn(move || {
                its.queue.send(message);
                its.told.tell();
                its.bell.ring();
            })
        });
        let mut heard = [false; 2];
        while heard != [true; 2] {
            if shared.told.take() {
                // Each has a queue of its own, as what is forgotten and what is woken have.
                for (message, heard) in heard.iter_mut().enumerate() {
                    *heard |= shared.queue.receive(message).is_some();
                }
            }
            if heard != [true; 2] {
                shared.bell.wait();
            }
        }
        tellers.into_iter().for_each(|teller| teller.join().expect("a teller"));
    });
}

fn cell() -> Cell {
    let word = || AtomicU32::new(0);
    Cell {
        flow: AtomicU64::new(0),
        sent: word(),
        received: word(),
        finished: AtomicU16::new(0),
        opened: AtomicU16::new(0),
        held: word(),
        acknowledged: word(),
        closed: word(),
    }
}

fn entry(number: u32) -> AllSent {
    AllSent {
        flow: number.into(),
        sent: number,
        received: number,
        finished: number as u16,
        acknowledged: !number,
        closed: !number,
        ..AllSent::default()
    }
}

#[test]
fn an_entry_posted_by_two_workers_at_once_holds_one_or_none() {
    model(|| {
        let cell = Arc::new(cell());
        let its = Arc::clone(&cell);
        let other = thread::spawn(move || its.post(entry(2)));
        cell.post(entry(1));
        other.join().expect("the other worker");
        let name = cell.flow.load(Ordering::Relaxed) as u32;
        let [sent, received] = [&cell.sent, &cell.received].map(|word| word.load(Ordering::Relaxed));
        let numbers = [sent, received, cell.finished.load(Ordering::Relaxed).into()];
        assert!(name == 0 || numbers == [name; 3], "{name} has the numbers {numbers:?}");
    });
}

#[test]
fn an_acknowledgement_is_never_attributed_to_another_connection() {
    model(|| {
        let cell = Arc::new(cell());
        cell.post(entry(1));
        let its = Arc::clone(&cell);
        let kernel = thread::spawn(move || {
            // The kernel hears an acknowledgement for whoever stands there.
            if its.flow.load(Ordering::Relaxed) == 1 {
                its.acknowledged.store(1, Ordering::Relaxed);
            }
        });
        let displaced = cell.post(entry(2));
        kernel.join().expect("the kernel");
        let before = Displaced { flow: 1, heard: Heard { acknowledged: 1, closed: !1 } };
        let unheard = Displaced { heard: Heard { acknowledged: !1, ..before.heard }, ..before };
        assert!(displaced == Some(before) || displaced == Some(unheard), "{displaced:?}");
        // Late, its word lands in an entry of another name, which expects another number.
        let found = cell.look(2).expect("the later one stands");
        assert!(found.acknowledged == !2 || found.acknowledged == 1, "{found:?}");
        assert_ne!(found.acknowledged, entry(2).sent, "heard what was never said");
        cell.withdraw(1);
        assert!(cell.look(2).is_some(), "withdrawn by somebody else");
        cell.withdraw(2);
        assert_eq!(cell.look(2), None);
    });
}

#[test]
fn a_held_connection_stays_counted_while_others_post_and_release() {
    model(|| {
        let cell = Arc::new(cell());
        cell.hold();
        cell.opened.store(7, Ordering::Relaxed);
        let its = Arc::clone(&cell);
        let other = thread::spawn(move || {
            its.hold();
            its.post(entry(2));
            its.withdraw(2);
            its.release();
        });
        cell.post(entry(1));
        // The kernel absorbs the end of a handshake only where this count is 0.
        assert!(cell.held.load(Ordering::Relaxed) >= 1);
        other.join().expect("the other worker");
        assert_eq!(cell.held.load(Ordering::Relaxed), 1);
        assert!(!cell.is_opened(7), "a connection has begun since");
        cell.release();
        assert_eq!(cell.held.load(Ordering::Relaxed), 0);
    });
}
