//! What one guest does to overwhelm the service costs that guest alone: the others crawl on, every frame is
//! accounted for, and when it stops it is served again.

#[path = "overload/bombs.rs"]
mod bombs;
#[path = "overload/connections.rs"]
mod connections;
#[path = "overload/floods.rs"]
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

/// Where the service is.
const SERVICE: (IpAddr, u16) = (IpAddr::V4(METADATA), 80);
/// For a guest that has stopped to be served again: its bucket fills within a second, and what it left open ends.
const RECOVERY: Duration = Duration::from_secs(60);

/// One way to overwhelm the service.
struct Attack {
    name: &'static str,
    /// Does it, and checks what the attacker hears.
    run: fn(&mut Station, &Agent<'_>) -> Result<()>,
    /// Whether frames of it may get to the bridge: those that are for nobody's metadata.
    leaves: bool,
}

/// Attacks of one group, one after the other, on one agent.
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
    if let Err(error) = nothing_is_left(&arena.agent) {
        failures.push(format!("{label}: {error:#}"));
    }
    assert!(
        failures.is_empty(),
        "{} of {} attacks are not withstood ({SEED}={seed}):\n{}\n{}",
        failures.len(),
        attacks.len(),
        failures.join("\n"),
        arena.agent.said()
    );
}

fn withstand_one(arena: &mut Arena<'_>, attack: &Attack) -> Result<Vec<usize>> {
    arena.witness.look()?;
    arena.attacker.hear()?;
    let (before, sent) = (books::verdicts(&arena.agent)?, arena.sent());
    let heard = (arena.attacker.sent.get().1, arena.attacker.heard.1);
    let ((), answered) = arena.meanwhile(attack.run)?;
    let counted: u64 = books::since(&before, &books::verdicts(&arena.agent)?).values().sum();
    let sent = arena.sent() - sent;
    ensure!(counted == sent, "{counted} frames have a verdict, of {sent} sent");
    let seen = arena.witness.look()?;
    ensure!(attack.leaves || seen.bridge.is_empty(), "on the bridge: {:02x?}", seen.bridge);
    eprintln!(
        "{}: {} octets sent, {} heard",
        attack.name,
        arena.attacker.sent.get().1 - heard.0,
        arena.attacker.heard.1 - heard.1
    );
    recovers(arena)?;
    books::balance(&arena.agent, 0)?;
    Ok(answered)
}

/// The attacker is served like everybody once it has stopped.
fn recovers(arena: &mut Arena<'_>) -> Result<()> {
    let identity = Identity::of(ATTACKER);
    let attacker = &mut arena.attacker;
    eventually(RECOVERY, || serves(&identity, attacker, PATHS[0]))
        .context("the attacker, once it has stopped")
}

/// What guests have left behind is gone in the end. The kernel ends connections by itself, which the agent hears of
/// when it needs the room, or after half a minute.
fn nothing_is_left(agent: &Agent<'_>) -> Result<()> {
    eventually(RECOVERY, || {
        let left = total(&agent.metrics()?, "xdp_imds_stack_connections", None);
        ensure!(left == 0, "{left} connections are left");
        Ok(())
    })
}
