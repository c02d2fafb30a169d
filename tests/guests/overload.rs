//! One guest's attempt to overwhelm the service costs only that guest.
//!
//! The other guests are served meanwhile, every frame is accounted for, and the attacker is served again once it stops.

mod bombs;
mod connections;
mod floods;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use support::agent::Agent;
use support::answers::PATHS;
use support::arena::{ATTACKER, Arena, Scene, serves};
use support::books::{self, total};
use support::eventually::eventually;
use support::guest::METADATA;
use support::privileged;
use support::record::Identity;
use support::seed::{SEED, seed};
use support::station::Station;
use support::tap::Shape;

/// Address and port of the service.
const SERVICE: (IpAddr, u16) = (IpAddr::V4(METADATA), 80);
/// Longest time until an attacker that has stopped is served again.
///
/// Its token bucket fills within a second; the connections it left open take longer to end.
const RECOVERY: Duration = Duration::from_secs(60);

/// One attempt to overwhelm the service.
struct Attack {
    name: &'static str,
    /// Carries out the attack and checks the answers to the attacker.
    run: fn(&mut Station, &Agent<'_>) -> Result<()>,
    /// True if frames of the attack may reach the bridge, because some are not for a metadata address.
    leaves: bool,
}

/// Runs the attacks of one group, one after another, on one agent.
fn withstand(label: &str, config: &str, attacks: &[Attack]) {
    if !privileged::or_skip() {
        return;
    }
    let seed = seed();
    fastrand::seed(seed);
    let scene = Scene::new(Shape::default()).expect("a node");
    let attacker = Identity::of(ATTACKER).with_user_data_of(connections::USER_DATA);
    attacker.write(scene.records(), 2).expect("a record");
    let mut arena = Arena::open(&scene, config).expect("an arena");
    let mut failures = Vec::new();
    for attack in attacks {
        let start = Instant::now();
        match withstand_one(&mut arena, attack) {
            Ok(answered) => {
                let took = start.elapsed();
                eprintln!("{label}/{}: {answered:?} requests of others, {took:.1?}", attack.name);
            }
            Err(error) => failures.push(format!("{label}/{}: {error:#}", attack.name)),
        }
    }
    if let Err(error) = has_no_connections(&arena.agent) {
        failures.push(format!("{label}: {error:#}"));
    }
    assert!(
        failures.is_empty(),
        "the agent did not withstand {} of {} attacks ({SEED}={seed}):\n{}\n{}",
        failures.len(),
        attacks.len(),
        failures.join("\n"),
        arena.agent.log()
    );
}

fn withstand_one(arena: &mut Arena<'_>, attack: &Attack) -> Result<Vec<usize>> {
    arena.witness.observe()?;
    arena.attacker.receive()?;
    let (before, sent) = (books::verdicts(&arena.agent)?, arena.sent());
    let heard = (arena.attacker.sent.get().1, arena.attacker.received.1);
    let ((), answered) = arena.meanwhile(attack.run)?;
    let counted: u64 = books::since(&before, &books::verdicts(&arena.agent)?).values().sum();
    let sent = arena.sent() - sent;
    let seen = arena.witness.observe()?;
    // A classifier does not count ordinary IPv4 frames; the bridge shows that these left.
    let uncounted = if arena.is_tcx && attack.leaves { seen.bridge.len() as u64 } else { 0 };
    ensure!(
        (counted..=counted + uncounted).contains(&sent),
        "{counted} of {sent} frames have a verdict, and {} left",
        seen.bridge.len()
    );
    ensure!(attack.leaves || seen.bridge.is_empty(), "frames reached the bridge: {:02x?}", seen.bridge);
    eprintln!(
        "{}: {} bytes sent, {} received",
        attack.name,
        arena.attacker.sent.get().1 - heard.0,
        arena.attacker.received.1 - heard.1
    );
    recovers(arena)?;
    books::balance(&arena.agent, 0)?;
    Ok(answered)
}

/// Waits until the attacker, which has stopped, is served again.
fn recovers(arena: &mut Arena<'_>) -> Result<()> {
    let identity = Identity::of(ATTACKER);
    let attacker = &mut arena.attacker;
    eventually(RECOVERY, || serves(&identity, attacker, PATHS[0]))
        .context("the attacker is not served after it stopped")
}

/// Waits until the agent has no connection.
///
/// The kernel ends connections by itself. The agent notices when it needs the room, or after half a minute.
fn has_no_connections(agent: &Agent<'_>) -> Result<()> {
    eventually(RECOVERY, || {
        let remaining = total(&agent.metrics()?, "xdp_imds_stack_connections", None);
        ensure!(remaining == 0, "{remaining} connections remain");
        Ok(())
    })
}
