//! Measures how long a modest guest's requests take on real taps, first beside a hundred idle guests, then while these
//! send all they can: `cargo bench -p xdp-imds-tests --bench fair_share_on_taps`. Needs root, and the agent must be
//! built. Prints each round and the medians, and asserts nothing. Needs four CPUs: the agent, the modest guest, the
//! fetchers and the junk senders have one each, so that they compete only for the agent's time.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use metadata_common::mac::Mac;
use metadata_common::wire::ethernet;
use rustix::thread::{CpuSet, Pid, sched_setaffinity};
use support::agent::{self, Agent, PortArgument};
use support::arena::serves;
use support::guest::METADATA;
use support::host::Host;
use support::raw::Segment;
use support::record::Identity;
use support::station::Station;
use support::tap::{Shape, Tap};
use support::tap_client::crowd;
use support::{frames, privileged};

/// Guests that fetch a large document again and again, and guests that send junk.
const FETCHERS: u16 = 50;
const JUNKERS: u16 = 50;
/// Bytes of the document: the default limit of a record.
const DOCUMENT: usize = 64 << 10;
/// Junk frames per guest and millisecond: the port's rate limit.
const JUNK: usize = 10;
const ROUNDS: usize = 5;
const PHASE: Duration = Duration::from_secs(6);
const PAUSE: Duration = Duration::from_millis(12);
/// Pause of a fetcher between documents. A VM is limited to 100 requests per second.
const FETCH_PAUSE: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_secs(10);

fn main() {
    if privileged::or_skip() {
        measure().expect("a measurement");
    }
}

/// Pins a thread to a CPU; `None` is the calling thread.
fn keep_to(thread: Option<Pid>, cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    if let Err(errno) = sched_setaffinity(thread, &set) {
        eprintln!("cannot pin a thread to CPU {cpu}: {errno}");
    }
}

fn measure() -> Result<()> {
    let mut host = Host::new()?;
    let records = tempfile::tempdir()?;
    let guests: Vec<Identity> = (0..=FETCHERS + JUNKERS)
        .map(|number| Identity::of(number).with_user_data_of(if number == 0 { 300 } else { DOCUMENT }))
        .collect();
    for guest in &guests {
        guest.write(records.path(), 1)?;
    }
    let taps = host.rack(&guests, Shape::default())?;
    let ports: Vec<_> =
        guests.iter().map(|guest| PortArgument::new(Host::tap_name(guest), guest.mac)).collect();
    let agent = Agent::start_binary(&agent::binary()?, host.ns(), agent::arguments(records.path(), &ports))?;
    // The agent is pinned only after its start, because it creates a queue for each CPU on which it may run.
    for thread in std::fs::read_dir(format!("/proc/{}/task", agent.pid()))? {
        keep_to(Pid::from_raw(thread?.file_name().to_string_lossy().parse()?), 0);
    }
    keep_to(None, 1);
    let mut modest = Station::new(Arc::clone(&taps[0]), guests[0].mac, guests[0].address);
    let fetchers: Vec<_> =
        guests.iter().cloned().zip(taps.iter().cloned()).skip(1).take(FETCHERS.into()).collect();
    let junkers: Vec<_> = guests.iter().zip(&taps).skip(1 + usize::from(FETCHERS)).collect();
    let mut all = [Vec::new(), Vec::new()];
    for round in 1..=ROUNDS {
        let alone = ask(&guests[0], &mut modest)?;
        let stop = AtomicBool::new(false);
        let (loaded, rounds, junk) = std::thread::scope(|scope| -> Result<_> {
            let fetching = scope.spawn(|| {
                keep_to(None, 2);
                crowd(fetchers.clone(), &["/v1/user-data"], FETCH_PAUSE, &stop, PATIENCE)
            });
            let sending = scope.spawn(|| {
                keep_to(None, 3);
                send_junk(&junkers, &stop)
            });
            std::thread::sleep(Duration::from_millis(500));
            let loaded = ask(&guests[0], &mut modest);
            stop.store(true, Ordering::Relaxed);
            let tallies = fetching.join().unwrap_or_default();
            let rounds = tallies.into_iter().map(|tally| tally.rounds).sum::<Result<usize>>()?;
            Ok((loaded?, rounds, sending.join().unwrap_or(0)))
        })?;
        let (alone, loaded) = (percentiles(alone), percentiles(loaded));
        println!(
            "round {round}: alone p50 {:?}, p99 {:?}; beside {rounds} documents and {junk} junk frames p50 {:?}, p99 {:?}",
            alone.0, alone.1, loaded.0, loaded.1
        );
        all[0].push(alone.1);
        all[1].push(loaded.1);
    }
    let [alone, loaded] = all.map(|mut all| {
        all.sort();
        all[all.len() / 2]
    });
    let ratio = loaded.as_secs_f64() / alone.as_secs_f64();
    println!(
        "medians of {ROUNDS}: p99 alone {alone:?}, beside a hundred greedy {loaded:?}: {ratio:.2} times"
    );
    for sample in agent.metrics()?.samples() {
        if sample.name.contains("lost_frames") && sample.value > 0.0 {
            println!("{sample:?}");
        }
    }
    Ok(())
}

/// Sends requests for the duration [`PHASE`] and returns how long each took.
fn ask(guest: &Identity, station: &mut Station) -> Result<Vec<Duration>> {
    let (start, mut took) = (Instant::now(), Vec::new());
    while start.elapsed() < PHASE {
        let asked = Instant::now();
        serves(guest, station, "/v1/user-data")?;
        took.push(asked.elapsed());
        std::thread::sleep(PAUSE);
    }
    Ok(took)
}

fn percentiles(mut took: Vec<Duration>) -> (Duration, Duration) {
    took.sort();
    (took[took.len() / 2], took[took.len() * 99 / 100])
}

/// Sends segments of unknown connections, at the rate limit of each guest, until stopped; returns their number.
fn send_junk(junkers: &[(&Identity, &Arc<Tap>)], stop: &AtomicBool) -> usize {
    let service = (IpAddr::V4(METADATA), 80);
    let frame = |guest: &Identity| {
        let source = (IpAddr::V4(guest.address), 40_000);
        let segment = Segment { to: Mac::SERVICE, source, destination: service, ..Segment::ack(0, 77, 99) };
        frames::with(segment.with(b"junk").frame(0), ethernet::SOURCE, &guest.mac.0)
    };
    let frames: Vec<_> = junkers.iter().map(|(guest, tap)| (frame(guest), tap)).collect();
    let (start, mut sent, mut buffer) = (Instant::now(), 0, [0; 2_048]);
    for tick in 1.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        for (frame, tap) in &frames {
            for _ in 0..JUNK {
                sent += usize::from(tap.send(0, frame).unwrap_or(false));
            }
            while matches!(tap.receive(0, &mut buffer), Ok(Some(_))) {}
        }
        std::thread::sleep((Duration::from_millis(1) * tick).saturating_sub(start.elapsed()));
    }
    sent
}
