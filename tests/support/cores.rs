//! A model of a boot storm on a machine with many cores: where its time goes, and where the first frame is lost.
//!
//! A guest works on its core, sends a request, and waits for the answer before it works again, as cloud-init does. A
//! core serves its guests in turn. A hub has one worker on a core of its own; the guest's frame waits in the queue that
//! its core feeds. A frame that finds the queue full is lost, and the guest sends it again after [`TIMEOUT`].

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// The time after which a guest sends a request again (Linux: the least retransmission timeout).
pub const TIMEOUT: Duration = Duration::from_millis(200);

/// A machine and its storm.
#[derive(Clone, Copy, Debug)]
pub struct Storm {
    /// Cores, those of the workers included.
    pub cores: usize,
    /// Workers, each with a hub. A VM belongs to one of them by its slot.
    pub workers: usize,
    /// VMs that boot at once.
    pub vms: usize,
    /// Requests of each VM, one after the other.
    pub requests: u32,
    /// CPU time of a request on the guest's core: the client's, the guest kernel's, and the programs' on the tap.
    pub guest: Duration,
    /// CPU time of a request in the worker, system calls included.
    pub worker: Duration,
    /// Receive queues of a hub.
    pub queues: usize,
    /// Frames that a queue holds.
    pub places: usize,
}

/// What happened.
#[derive(Clone, Debug)]
pub struct Course {
    /// The time at which each VM had its last answer, sorted.
    pub boots: Vec<Duration>,
    /// The most frames that waited in one queue.
    pub most_waiting: usize,
    /// Frames that found their queue full.
    pub lost: u64,
    /// The time that the busiest worker worked, as a share of the storm.
    pub load: f64,
}

impl Course {
    /// The time within which this share of VMs, from 0 to 1, has booted.
    #[must_use]
    pub fn within(&self, share: f64) -> Duration {
        let at = (self.boots.len() as f64 * share).ceil() as usize;
        self.boots[at.clamp(1, self.boots.len()) - 1]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The VM has CPU work to do for its next request.
    Works(usize),
    /// Its request reaches the hub.
    Sends(usize),
    /// Its request is answered.
    Answered(usize),
}

impl Storm {
    /// Runs the storm.
    ///
    /// # Panics
    /// Without a VM, a worker, a queue, or a core beside those of the workers.
    #[must_use]
    pub fn run(&self) -> Course {
        let guests_on = self.cores - self.workers;
        assert!(guests_on > 0 && self.workers > 0 && self.vms > 0 && self.queues > 0, "{self:?}");
        let core_of = |vm: usize| vm % guests_on;
        let queue_of = |vm: usize| (vm % self.workers, core_of(vm) % self.queues);
        let mut core_free = vec![Duration::ZERO; guests_on];
        let mut worker_free = vec![Duration::ZERO; self.workers];
        let mut served = vec![0_u32; self.workers];
        let mut waiting = vec![vec![0_usize; self.queues]; self.workers];
        let mut left = vec![self.requests; self.vms];
        let mut events: BinaryHeap<_> =
            (0..self.vms).map(|vm| Reverse((Duration::ZERO, Event::Works(vm)))).collect();
        let mut course = Course { boots: Vec::new(), most_waiting: 0, lost: 0, load: 0.0 };
        while let Some(Reverse((now, event))) = events.pop() {
            match event {
                Event::Works(vm) => {
                    let free = &mut core_free[core_of(vm)];
                    *free = now.max(*free) + self.guest;
                    events.push(Reverse((*free, Event::Sends(vm))));
                }
                Event::Sends(vm) => {
                    let (hub, queue) = queue_of(vm);
                    if waiting[hub][queue] == self.places {
                        course.lost += 1;
                        events.push(Reverse((now + TIMEOUT, Event::Sends(vm))));
                        continue;
                    }
                    waiting[hub][queue] += 1;
                    course.most_waiting = course.most_waiting.max(waiting[hub][queue]);
                    let free = &mut worker_free[hub];
                    *free = now.max(*free) + self.worker;
                    events.push(Reverse((*free, Event::Answered(vm))));
                }
                Event::Answered(vm) => {
                    let (hub, queue) = queue_of(vm);
                    waiting[hub][queue] -= 1;
                    served[hub] += 1;
                    left[vm] -= 1;
                    match left[vm] {
                        0 => course.boots.push(now),
                        _ => events.push(Reverse((now, Event::Works(vm)))),
                    }
                }
            }
        }
        let most = served.iter().copied().max().unwrap_or(0);
        course.load = (self.worker * most).as_secs_f64() / course.within(1.0).as_secs_f64();
        course
    }
}

#[cfg(test)]
mod tests {
    use super::{Course, Storm, TIMEOUT};
    use std::time::Duration;

    const US: Duration = Duration::from_micros(1);

    fn storm() -> Storm {
        let (guest, worker) = (10 * US, 5 * US);
        Storm { cores: 9, workers: 1, vms: 80, requests: 4, guest, worker, queues: 8, places: 100 }
    }

    #[test]
    fn one_vm_alone_waits_for_nobody() {
        let Course { boots, most_waiting, lost, load } = Storm { vms: 1, ..storm() }.run();
        assert_eq!((boots, most_waiting, lost), (vec![60 * US], 1, 0));
        assert!((load - 20.0 / 60.0).abs() < 1e-9);
    }

    #[test]
    fn a_storm_ends_when_its_bottleneck_has_done_all_work() {
        let by_worker = storm().run();
        let work = 80 * 4 * 5 * US;
        assert!((work..work + 20 * US).contains(&by_worker.within(1.0)), "{:?}", by_worker.within(1.0));
        assert!(by_worker.load > 0.98, "{}", by_worker.load);
        let by_guests = Storm { cores: 16, workers: 8, ..storm() }.run();
        let work = 80 / 8 * 4 * 10 * US;
        assert!((work..work + 100 * US).contains(&by_guests.within(1.0)), "{:?}", by_guests.within(1.0));
        assert!(by_guests.load < 0.6, "{}", by_guests.load);
    }

    #[test]
    fn frames_beyond_the_places_of_a_queue_are_lost_and_sent_again() {
        let enough = Storm { places: 10, ..storm() }.run();
        assert_eq!(enough.lost, 0, "80 VMs and 8 queues");
        let course = Storm { places: 2, ..storm() }.run();
        assert!(course.lost > 0 && course.most_waiting == 2, "{} lost", course.lost);
        assert!(course.within(1.0) > TIMEOUT);
        assert_eq!(course.boots.len(), 80, "every VM boots");
    }
}
