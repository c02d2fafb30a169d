//! A tap of several queues gives its guest's answers to the queues that are attached, from whichever CPU they come.
//!
//! XDP returns and redirects a frame to the queue whose number is that of the CPU it runs on, modulo the number of
//! attached queues (`tun_xdp_xmit` in drivers/net/tun.c). QEMU detaches the queues that its guest does not use.
//! Classifiers send a frame as the host would, and the tap then chooses the queue on which its guest sent.

use std::net::IpAddr;
use std::sync::Arc;

use support::agent::{self, Agent, PortArgument};
use support::answers::{self, PATHS};
use support::guest::METADATA;
use support::host::Host;
use support::privileged;
use support::record::Identity;
use support::station::{Station, answer, get};
use support::tap::{Backend, Shape};

const SERVICE: (IpAddr, u16) = (IpAddr::V4(METADATA), 80);
const QUEUES: usize = 4;

/// A node with the record of guest 0, and that guest's tap.
struct Scene {
    host: Host,
    records: tempfile::TempDir,
    identity: Identity,
}

impl Scene {
    fn new() -> Self {
        let host = Host::new().expect("a node");
        let records = tempfile::tempdir().expect("a directory");
        let identity = Identity::of(0);
        identity.write(records.path(), 1).expect("a record");
        Self { host, records, identity }
    }

    fn agent(&self, mode: &str) -> Agent<'_> {
        let ports = [PortArgument::new(Host::tap_name(&self.identity), self.identity.mac)];
        let mut words = agent::arguments(self.records.path(), &ports);
        words.extend(["--steer".into(), mode.into()]);
        let binary = agent::binary().expect("the agent is built");
        Agent::start_binary(&binary, self.host.ns(), words).expect("an agent")
    }

    /// The first queue of a tap, and its second. Both are attached.
    fn two_queues(&self) -> [Station; 2] {
        let shape = Shape { queues: 2, vnet_hdr: true };
        let first = self.host.tap(&self.identity, shape).expect("a tap");
        first.detach_queue(1).expect("a detached queue");
        let second = first.another_queue(self.host.ns()).expect("the second attached queue");
        [first, Arc::new(second)].map(|tap| Station::new(tap, self.identity.mac, self.identity.address))
    }

    /// Fetches a document of the guest and checks it.
    fn fetch(&self, station: &mut Station, name: &str) {
        let received = station.ask(SERVICE, &get(PATHS[0]));
        let received = received.unwrap_or_else(|error| panic!("{name}: {error:#}"));
        let (status, body) = answer(&received).unwrap_or_else(|error| panic!("{name}: {error:#}"));
        answers::check(&self.identity, PATHS[0], status, &body)
            .unwrap_or_else(|error| panic!("{name}: {error:#}"));
    }
}

/// Two CPUs at most: they choose different ones of any even number of queues.
fn cpus() -> impl Iterator<Item = usize> {
    0..std::thread::available_parallelism().map_or(1, Into::into).min(2)
}

/// Moves all threads of a process to a CPU.
fn run_threads_on(process: u32, cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    for entry in std::fs::read_dir(format!("/proc/{process}/task")).expect("threads").flatten() {
        let number =
            entry.file_name().to_string_lossy().parse().ok().and_then(rustix::process::Pid::from_raw);
        rustix::thread::sched_setaffinity(number, &set).expect("the thread may run there");
    }
}

/// Moves the calling thread, and the threads of the kernel that send for it, to a CPU.
fn run_on(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).expect("this thread may run there");
    // A thread of vhost-net has the name of the thread that attached it. Since Linux 6.4 it belongs to its process.
    let name = format!("vhost-{}", rustix::thread::gettid().as_raw_pid());
    for directory in ["/proc", "/proc/self/task"] {
        for entry in std::fs::read_dir(directory).expect("processes").flatten() {
            let comm = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            let number =
                entry.file_name().to_string_lossy().parse().ok().and_then(rustix::process::Pid::from_raw);
            if let Some(thread) = number.filter(|_| comm.trim_end() == name) {
                rustix::thread::sched_setaffinity(Some(thread), &set).expect("vhost-net may run there");
            }
        }
    }
}

#[test]
fn a_guest_whose_other_queues_are_detached_is_served_from_any_cpu() {
    is_served_from_any_cpu(Backend::Calls);
}

#[test]
fn a_guest_behind_vhost_net_whose_other_queues_are_detached_is_served_from_any_cpu() {
    is_served_from_any_cpu(Backend::VhostNet);
}

#[track_caller]
fn is_served_from_any_cpu(backend: Backend) {
    if !backend.or_skip() {
        return;
    }
    let scene = Scene::new();
    let shape = Shape { queues: QUEUES, vnet_hdr: true };
    let tap = scene.host.tap(&scene.identity, shape).expect("a tap");
    if backend == Backend::VhostNet {
        tap.attach_vhost().expect("vhost-net takes the tap");
    }
    for queue in 1..QUEUES {
        tap.detach_queue(queue).expect("a detached queue");
    }
    let _agent = scene.agent("auto");
    let mut station = Station::new(Arc::clone(&tap), scene.identity.mac, scene.identity.address);
    for queues in 1..=2 {
        if queues == 2 {
            // The guest's driver begins to use its second pair, and QEMU attaches it.
            tap.attach_queue(1).expect("an attached queue");
        }
        for cpu in cpus() {
            run_on(cpu);
            for queue in 0..queues {
                station.queue = queue;
                scene
                    .fetch(&mut station, &format!("{queues} queues attached, by queue {queue} on CPU {cpu}"));
            }
        }
    }
}

/// The limit of docs/src/reference/limits.md: a kernel that no longer chooses by CPU makes it obsolete.
#[privileged::test]
fn xdp_answers_by_the_attached_queue_of_its_cpu_even_if_the_guest_does_not_read_it() {
    let scene = Scene::new();
    let mut queues = scene.two_queues();
    let _agent = scene.agent("xdp");
    for cpu in cpus() {
        run_on(cpu);
        let talk = queues[1].talk(SERVICE);
        // XDP answers before the call returns.
        queues[1].transmit(&talk.syn()).expect("a SYN");
        let found = queues
            .each_mut()
            .map(|queue| queue.segments().expect("its frames").iter().any(|reply| talk.is_theirs(reply)));
        assert_eq!(
            found,
            [cpu == 0, cpu == 1],
            "CPU {cpu}: found on the queue that nobody reads, on the other"
        );
    }
}

#[privileged::test]
fn with_classifiers_answers_follow_the_queue_that_the_guest_uses() {
    let scene = Scene::new();
    let [_unread, mut read] = scene.two_queues();
    let agent = scene.agent("tcx");
    for cpu in cpus() {
        run_on(cpu);
        // XDP would redirect what the agent sends by its own CPU.
        run_threads_on(agent.pid(), cpu);
        scene.fetch(&mut read, &format!("CPU {cpu}"));
    }
}
