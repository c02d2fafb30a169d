//! On any network, every request gets its exact answer or ends cleanly, and only the network loses frames.
//!
//! A seed determines a network: its clients, the faults of their links, and their requests. `XDP_IMDS_SEED=N` repeats
//! the network of seed N.

use std::fmt::Write as _;
use std::time::Duration;

use metadata_datapath::stack::StackConfig;
use support::client::{Client, Habits};
use support::network::{Fault, Network, Path, Station};
use support::pattern::{bytes, responses, stack};
use support::seed;
use support::wire::Rng;

/// Number of networks to draw when no seed is given.
const SEEDS: u64 = 60;
const CLIENTS_MOST: u64 = 12;
const TALKS_MOST: u64 = 4;
/// Length of the longest answer, in bytes.
const ANSWER_MOST: u64 = 40_000;
/// Limit of a simulation.
///
/// Retransmissions back off up to a minute, and the connection of a silent guest is reset after two minutes.
const LIMIT: Duration = Duration::from_secs(1_200);
/// Time after which the stack has forgotten all connections.
const SETTLED: Duration = Duration::from_secs(1_000);
/// The status of the answer if a request did not arrive in time.
const TOO_SLOW: u16 = 408;
const MS: Duration = Duration::from_millis(1);

/// The requests of one client and the faults of its links.
struct Plan {
    habits: Habits,
    up: Vec<Fault>,
    down: Vec<Fault>,
    asked: Vec<usize>,
    /// Whether the link also corrupts frames to the stack. The answers are not checked in this case.
    corrupts_requests: bool,
}

fn faults(rng: &mut Rng) -> Vec<Fault> {
    let all = [
        Fault::Delay(MS * rng.below(60) as u32),
        Fault::Drop(rng.below(12)),
        Fault::Duplicate(rng.below(20)),
        Fault::Reorder(rng.below(25), MS * (1 + rng.below(30) as u32)),
        Fault::TailDrop { rate: 200_000 + rng.below(2_000_000), room: 4_000 + rng.below(60_000) as usize },
        Fault::Mtu(1_514 - rng.below(60) as usize),
    ];
    let mut chosen: Vec<Fault> = all.into_iter().filter(|_| rng.percent(50)).collect();
    // The order is random, because a queue drops other frames before a delay than after it.
    for at in (1..chosen.len()).rev() {
        chosen.swap(at, rng.below(at as u64 + 1) as usize);
    }
    chosen
}

fn plan(rng: &mut Rng) -> Plan {
    let (mut up, mut down) = (faults(rng), faults(rng));
    if rng.percent(40) {
        down.push(Fault::Corrupt(rng.below(10)));
    }
    let corrupts_requests = rng.percent(10);
    if corrupts_requests {
        up.push(Fault::Corrupt(5));
    }
    let window = [1_460, 4_096, 16_384, 65_535, 262_144][rng.below(5) as usize];
    let habits = Habits {
        mtu: [576, 1_280, 1_500][rng.below(3) as usize],
        window,
        write: [usize::MAX, usize::MAX, 7][rng.below(3) as usize],
        read: [usize::MAX, usize::MAX, 2_000][rng.below(3) as usize],
        read_pause: MS * rng.below(5) as u32,
    };
    let asked = (0..1 + rng.below(TALKS_MOST)).map(|_| rng.below(ANSWER_MOST) as usize).collect();
    Plan { habits, up, down, asked, corrupts_requests }
}

/// Simulates one network; returns its digest and its number of frames.
fn simulate(seed: u64) -> (u64, u64) {
    let mut rng = Rng::exactly(seed);
    let plans: Vec<Plan> = (0..1 + rng.below(CLIENTS_MOST)).map(|_| plan(&mut rng)).collect();
    let stations = (0..).zip(&plans).map(|(slot, plan)| {
        let mut client = Client::new(slot, plan.habits);
        for (port, asked) in (40_000..).zip(&plan.asked) {
            let request = format!("GET /bytes/{asked} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
            let talk = client.begin(port, request.as_bytes());
            client.close(talk);
        }
        Station { client, paths: [Path::new(&plan.up, &mut rng), Path::new(&plan.down, &mut rng)] }
    });
    let stations: Vec<Station> = stations.collect();
    let mut network = Network::new(stack(StackConfig::default()).0, stations);
    // A client has no timers. It waits for ever if the reset of the service was lost, and the network falls quiet.
    let over = network.run(LIMIT, |network| network.is_over() || network.is_quiet());
    network.assert_conserved();
    for (slot, (plan, station)) in plans.iter().zip(&network.stations).enumerate() {
        for (talk, asked) in plan.asked.iter().enumerate() {
            let received = &station.client.talks[talk].received;
            assert_exact_or_clean(&format!("client {slot}, {asked} bytes"), plan, *asked, received);
        }
    }
    assert!(over, "a client still waits after {LIMIT:?}");
    network.run(SETTLED, |_| false);
    network.assert_conserved();
    let stats = network.stack.stats();
    assert_eq!((stats.connections, stats.ports, stats.faults), (0, 0, 0), "{stats:?}");
    let up = network.stations.iter().map(|station| station.paths[0].counts().delivered).sum::<u64>();
    let down = network.stations.iter().map(|station| station.paths[1].counts().sent).sum::<u64>();
    assert_eq!((stats.received, stats.sent), (up, down), "the stack missed frames in its counts");
    (network.digest(), network.frames())
}

/// Asserts that `received` is the answer or the beginning of it.
fn assert_exact_or_clean(who: &str, plan: &Plan, asked: usize, received: &[u8]) {
    if plan.corrupts_requests {
        return;
    }
    let expected = bytes(asked);
    if let Some(answer) = responses(received, &[]).first() {
        if answer.status == TOO_SLOW {
            return;
        }
        assert_eq!(answer.status, 200, "{who}: {}", answer.head);
        assert!(answer.body == expected, "{who}: the body differs");
        return;
    }
    // A reset ended the connection early: the bytes received before must belong to the answer.
    if let Some(head) = received.windows(4).position(|four| four == b"\r\n\r\n") {
        let body = &received[head + 4..];
        assert!(expected.starts_with(body), "{who}: bytes that do not belong to the answer");
    }
}

/// Runs `check` on every seed, or only on the given seed. A failure names the command that repeats it.
fn for_each_seed(test: &str, check: impl Fn(u64) + std::panic::RefUnwindSafe) {
    let given = std::env::var(seed::SEED).ok().map(|_| seed::seed());
    let seeds = given.map_or(0..SEEDS, |seed| seed..seed + 1);
    for seed in seeds {
        let kept = std::panic::catch_unwind(|| check(seed));
        assert!(
            kept.is_ok(),
            "repeat with: {}={seed} cargo test -p xdp-imds-tests --test tcp {test}",
            seed::SEED
        );
    }
}

#[test]
fn every_request_gets_its_exact_answer_or_ends_cleanly_on_any_network() {
    for_each_seed("every_request", |seed| {
        let (_, frames) = simulate(seed);
        assert!(frames > 10, "a network of {frames} frames is too small");
    });
}

#[test]
fn equal_seeds_give_equal_networks_frame_by_frame() {
    let mut digests = Vec::new();
    for seed in 0..6 {
        let once = simulate(seed);
        assert_eq!(once, simulate(seed), "seed {seed}");
        digests.push(once.0);
    }
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 6, "different seeds must give different networks");
}

/// Length of the answer in the table, in bytes.
const TABLE_BODY: usize = 200_000;
/// Number of networks of which each figure is the median.
const TABLE_SEEDS: u64 = 7;
const LOSSES: [u64; 4] = [0, 1, 5, 15];
const ROUND_TRIPS_MS: [u32; 3] = [1, 20, 100];

/// Goodput of one answer in KiB per second of virtual time, by loss in each direction and round trip.
///
/// The figures are the same on every machine. Adapt them after an intended change to how the stack sends answers.
const TABLE: &str = "\
loss     1 ms    20 ms   100 ms
 0 %    26041     1302      260
 1 %    20559     1027      205
 5 %      157      103       48
15 %       40       35       22";

fn goodput(loss: u64, round_trip_ms: u32) -> u64 {
    let one = |seed| {
        let mut rng = Rng::exactly(seed * 1_000 + loss);
        let faults = [Fault::Drop(loss), Fault::Delay(MS * round_trip_ms / 2)];
        let mut client = Client::new(0, Habits { window: 1 << 18, ..Habits::default() });
        let request = format!("GET /bytes/{TABLE_BODY} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        client.begin(40_000, request.as_bytes());
        let paths = [Path::new(&faults, &mut rng), Path::new(&faults, &mut rng)];
        let mut network = Network::new(stack(StackConfig::default()).0, vec![Station { client, paths }]);
        let done = network.run(LIMIT, |network| network.stations[0].client.talks[0].ended);
        assert!(done, "loss {loss} %, round trip {round_trip_ms} ms");
        (TABLE_BODY as f64 / 1024.0 / network.now().as_secs_f64()) as u64
    };
    let mut all: Vec<u64> = (0..TABLE_SEEDS).map(one).collect();
    all.sort_unstable();
    all[all.len() / 2]
}

#[test]
fn goodput_by_loss_and_round_trip_is_unchanged() {
    let mut table = String::from("loss");
    for round_trip in ROUND_TRIPS_MS {
        let _ = write!(table, " {:>8}", format!("{round_trip} ms"));
    }
    for loss in LOSSES {
        let _ = write!(table, "\n{loss:>2} %");
        for round_trip in ROUND_TRIPS_MS {
            let _ = write!(table, " {:>8}", goodput(loss, round_trip));
        }
    }
    assert!(table == TABLE, "the figures in KiB per second are now\n{table}\nand were\n{TABLE}");
}
