//! Lock-free code that threads share is correct in every execution that the memory model allows.
//!
//! The tests compile the agent's source files with loom's atomics. Loom runs a model once for each interleaving of the
//! threads, up to a number of preemptions, and for each value that a load may return.

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};
}

#[path = "../metadata-user/datapath/src/afxdp/all_sent/cell.rs"]
mod cell;
#[path = "../metadata-user/datapath/src/worker/pending.rs"]
mod pending;

use loom::sync::atomic::AtomicUsize;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use metadata_common::maps::AllSent;
use metadata_datapath::stack::{DisplacedConnection, KernelReceipt};

use cell::AtomicEntry;
use pending::Pending;
use sync::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// Maximum number of preemptions in one execution. Three reveal all known defects; more take minutes.
const PREEMPTIONS: usize = 3;

fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(f);
}

/// A model of an eventfd: it stays signalled until a thread waits on it.
#[derive(Debug, Default)]
struct Bell {
    rung: Mutex<bool>,
    ring: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock().expect("no thread panics while it holds the lock") = true;
        self.ring.notify_one();
    }

    /// Sleeps until it is signalled, then clears the signal.
    fn wait(&self) {
        let mut rung = self.rung.lock().expect("no thread panics while it holds the lock");
        while !*rung {
            rung = self.ring.wait(rung).expect("no thread panics while it holds the lock");
        }
        *rung = false;
    }
}

/// A queue with the weakest sufficient memory ordering: publishing a message publishes no other.
#[derive(Debug)]
struct Queue<const N: usize>([AtomicUsize; N]);

impl<const N: usize> Queue<N> {
    fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicUsize::new(0)))
    }

    fn send(&self, at: usize) {
        self.0[at].store(at + 1, Ordering::Release);
    }

    /// The message at this index, or `None` if this thread cannot see it yet.
    fn receive(&self, at: usize) -> Option<usize> {
        self.0.get(at)?.load(Ordering::Acquire).checked_sub(1)
    }
}

/// State that the control side and a worker of [`metadata_datapath::worker`] share.
#[derive(Debug)]
struct Shared<const N: usize> {
    pending: Pending,
    queue: Queue<N>,
    bell: Bell,
}

/// The message part of the worker's loop: at most `batch` messages per turn, then sleep.
fn receive_all<const N: usize>(shared: &Shared<N>, batch: usize) {
    let mut received = 0;
    while received < N {
        let mut taken = 0;
        if shared.pending.take() {
            while taken < batch && shared.queue.receive(received) == Some(received) {
                (received, taken) = (received + 1, taken + 1);
            }
            if taken == batch {
                shared.pending.set_again();
            }
        }
        if received < N && taken < batch {
            shared.bell.wait();
        }
    }
}

fn every_message_is_received<const N: usize>(batch: usize) {
    model(move || {
        let shared =
            Arc::new(Shared::<N> { pending: Pending::new(), queue: Queue::new(), bell: Bell::default() });
        let theirs = Arc::clone(&shared);
        let sender = thread::spawn(move || {
            for message in 0..N {
                theirs.queue.send(message);
                theirs.pending.set();
                theirs.bell.ring();
            }
        });
        // If the worker misses a message it sleeps for ever, which loom reports as a deadlock.
        receive_all(&shared, batch);
        sender.join().expect("the sender");
    });
}

#[test]
fn a_worker_receives_every_message_and_never_sleeps_through_one() {
    every_message_is_received::<1>(1);
    every_message_is_received::<2>(2);
}

#[test]
fn a_worker_that_takes_one_message_per_turn_receives_all() {
    every_message_is_received::<2>(1);
}

#[test]
fn messages_of_two_concurrent_senders_are_both_received() {
    model(|| {
        let shared =
            Arc::new(Shared::<2> { pending: Pending::new(), queue: Queue::new(), bell: Bell::default() });
        let senders = [0, 1].map(|message| {
            let theirs = Arc::clone(&shared);
            thread::spawn(move || {
                theirs.queue.send(message);
                theirs.pending.set();
                theirs.bell.ring();
            })
        });
        let mut received = [false; 2];
        while received != [true; 2] {
            if shared.pending.take() {
                // Each sender has its own queue, like forgotten and woken slots.
                for (message, received) in received.iter_mut().enumerate() {
                    *received |= shared.queue.receive(message).is_some();
                }
            }
            if received != [true; 2] {
                shared.bell.wait();
            }
        }
        senders.into_iter().for_each(|sender| sender.join().expect("a sender"));
    });
}

fn cell() -> AtomicEntry {
    let word = || AtomicU32::new(0);
    AtomicEntry {
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
fn an_entry_that_two_workers_post_at_once_is_one_of_the_two_or_empty() {
    model(|| {
        let cell = Arc::new(cell());
        let theirs = Arc::clone(&cell);
        let other = thread::spawn(move || theirs.post(entry(2), |_| false));
        cell.post(entry(1), |_| false);
        other.join().expect("the other worker");
        let name = cell.flow.load(Ordering::Relaxed) as u32;
        let [sent, received] = [&cell.sent, &cell.received].map(|word| word.load(Ordering::Relaxed));
        let numbers = [sent, received, cell.finished.load(Ordering::Relaxed).into()];
        assert!(name == 0 || numbers == [name; 3], "entry {name} has the numbers {numbers:?}");
    });
}

#[test]
fn an_acknowledgement_is_never_attributed_to_another_connection() {
    model(|| {
        let cell = Arc::new(cell());
        cell.post(entry(1), |_| false);
        let theirs = Arc::clone(&cell);
        let kernel = thread::spawn(move || {
            // The kernel records an acknowledgement for the connection in the entry.
            if theirs.flow.load(Ordering::Relaxed) == 1 {
                theirs.acknowledged.store(1, Ordering::Relaxed);
            }
        });
        let displaced = cell.post(entry(2), |_| false);
        kernel.join().expect("the kernel");
        let before = DisplacedConnection { flow: 1, heard: KernelReceipt { acknowledged: 1, closed: !1 } };
        let unheard =
            DisplacedConnection { heard: KernelReceipt { acknowledged: !1, ..before.heard }, ..before };
        assert!(displaced == Some(before) || displaced == Some(unheard), "{displaced:?}");
        // A late store of the kernel may reach the entry of connection 2, which expects another number.
        let found = cell.look(2).expect("the later entry is present");
        assert!(found.acknowledged == !2 || found.acknowledged == 1, "{found:?}");
        assert_ne!(found.acknowledged, entry(2).sent, "acknowledged bytes that were never sent");
        cell.withdraw(1);
        assert!(cell.look(2).is_some(), "connection 1 must not withdraw the entry of connection 2");
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
        let theirs = Arc::clone(&cell);
        let other = thread::spawn(move || {
            theirs.hold();
            theirs.post(entry(2), |_| false);
            theirs.withdraw(2);
            theirs.release();
        });
        cell.post(entry(1), |_| false);
        // The kernel absorbs the end of a handshake only if this count is 0.
        assert!(cell.held.load(Ordering::Relaxed) >= 1);
        other.join().expect("the other worker");
        assert_eq!(cell.held.load(Ordering::Relaxed), 1);
        assert!(!cell.is_opened(7), "a connection has begun since");
        cell.release();
        assert_eq!(cell.held.load(Ordering::Relaxed), 0);
    });
}
