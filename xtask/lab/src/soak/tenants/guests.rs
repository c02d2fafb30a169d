//! Attacks by guests, some of them with a record that their tenant wrote.

use super::attack::Ground;
use super::bulk::with_network;
use super::http::{ask, connect, request};
use super::node::{Pod, from_secret};
use super::yaml;
use crate::soak::shared::Shared;
use anyhow::{Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::eventually::eventually;
use support::guest::Guest;
use support::netns::Namespace;
use support::tap::Shape;
use support::tap_client::impatient_storm;

/// The longest time until a guest of an attack is served the first time.
const SERVED_WITHIN: Duration = Duration::from_secs(60);
/// The longest time for which a victim may get no answer at all.
const SILENCE: Duration = Duration::from_secs(15);
/// Pause between two rounds of a duel.
const ROUND: Duration = Duration::from_millis(500);

const GOOGLE: &str = "Metadata-Flavor: Google";
const ATTRIBUTE: &str = "/computeMetadata/v1/instance/guest-attributes/hostkeys/ssh";
const PASSWORD: &str = "/openstack/latest/password";
const TOKEN: &str = "/v1/identity/jwt?audience=https://soak.example";
const DOCUMENT: &str = "/latest/dynamic/instance-identity/document";
/// What the victim writes, and what the attacker writes.
const VICTIMS: &str = "state-of-the-victim";
const FORGED: &str = "state-of-the-attacker";

/// Two VMs of different tenants with one UUID. Neither may see or change what belongs to the other.
pub(super) struct Duel<'a> {
    /// What the two have in common, for messages.
    pub(super) what: &'static str,
    pub(super) victim: &'a Namespace,
    pub(super) attacker: &'a Namespace,
}

impl Duel<'_> {
    /// Fights until the ground says that it is over.
    pub(super) fn fight(&self, ground: &Ground<'_>) -> Result<()> {
        for ns in [self.victim, self.attacker] {
            let served = eventually(SERVED_WITHIN, || {
                let answer = ask(ns, "GET /v1/user-data", &[], "")?;
                ensure!(answer.status == 200 || ground.is_over(), "answered {}", answer.status);
                Ok(())
            });
            if let Err(error) = served {
                ground.attacks.breach(format!("{}: a VM is not served: {error:#}", self.what));
                return Ok(());
            }
        }
        ground.wait_for_start();
        let mut found = Findings { what: self.what, shared: ground.attacks, known: BTreeSet::new() };
        // Errors of transport count by the victim's silence below.
        _ = ask(self.victim, &format!("PUT {ATTRIBUTE}"), &[GOOGLE], VICTIMS);
        _ = ask(self.victim, &format!("POST {PASSWORD}"), &[], VICTIMS);
        let mut answered = Instant::now();
        while !ground.is_over() {
            self.attack(&mut found);
            ground.act();
            if self.check_victim(&mut found).is_ok() {
                answered = Instant::now();
            }
            found.check("the victim gets no answer any more", answered.elapsed() > SILENCE);
            ground.sleep(ROUND);
        }
        Ok(())
    }

    fn attack(&self, found: &mut Findings<'_>) {
        let read = |path: &str, fields: &[&str]| {
            ask(self.attacker, &format!("GET {path}"), fields, "").unwrap_or_default()
        };
        found.check(
            "the attacker reads the victim's attribute",
            read(ATTRIBUTE, &[GOOGLE]).body.contains(VICTIMS),
        );
        found.check("the attacker reads the victim's password", read(PASSWORD, &[]).body.contains(VICTIMS));
        _ = ask(self.attacker, &format!("PUT {ATTRIBUTE}"), &[GOOGLE], FORGED);
        _ = ask(self.attacker, &format!("POST {PASSWORD}"), &[], FORGED);
        let of_victim = |path: &str, fields: &[&str]| {
            ask(self.victim, &format!("GET {path}"), fields, "").unwrap_or_default()
        };
        let field = &["Metadata: true"];
        let subjects = [read(TOKEN, field), of_victim(TOKEN, field)].map(|answer| subject(&answer.body));
        found.check("both get tokens with one subject", subjects[0].is_some() && subjects[0] == subjects[1]);
        let ids = [read(DOCUMENT, &[]), of_victim(DOCUMENT, &[])].map(|answer| instance_id(&answer.body));
        found.check("both are the same EC2 instance", ids[0].is_some() && ids[0] == ids[1]);
    }

    /// Checks what the victim reads. An error means that it got no answer.
    fn check_victim(&self, found: &mut Findings<'_>) -> Result<()> {
        let answer = ask(self.victim, &format!("GET {ATTRIBUTE}"), &[GOOGLE], "")?;
        found.check("the victim reads a forged attribute", answer.body.contains(FORGED));
        if answer.status == 404 {
            // It could not be written yet, or is lost.
            let written = ask(self.victim, &format!("PUT {ATTRIBUTE}"), &[GOOGLE], VICTIMS)?;
            ensure!(written.status < 300, "answered {}", written.status);
        }
        let password = ask(self.victim, &format!("GET {PASSWORD}"), &[], "")?;
        found.check("the victim reads a forged password", password.body.contains(FORGED));
        Ok(())
    }
}

/// Breaches, each reported once.
struct Findings<'a> {
    what: &'static str,
    shared: &'a Shared,
    known: BTreeSet<&'static str>,
}

impl Findings<'_> {
    fn check(&mut self, finding: &'static str, is_so: bool) {
        // Once the agent has ended, or the attacks are over, silence says nothing.
        if is_so && !self.shared.is_over() && self.known.insert(finding) {
            self.shared.breach(format!("{}: {finding}", self.what));
        }
    }
}

/// The subject of a token, without a check of its signature.
fn subject(token: &str) -> Option<String> {
    let claims = URL_SAFE_NO_PAD.decode(token.trim().split('.').nth(1)?).ok()?;
    let claims: Value = serde_json::from_slice(&claims).ok()?;
    claims["sub"].as_str().map(str::to_owned)
}

fn instance_id(document: &str) -> Option<String> {
    let document: Value = serde_json::from_str(document).ok()?;
    document["instanceId"].as_str().map(str::to_owned)
}

/// A pod with a served guest.
fn served<'a>(ground: &Ground<'a>, namespace: &str, uuid: Option<&str>) -> Result<(Pod<'a>, Guest)> {
    let pod = ground.node.pod(namespace)?;
    pod.user_data(format!("#cloud-config\n# {}\n", pod.uid).as_bytes())?;
    let guest = pod.guest()?;
    let mut vmi = pod.vmi(&from_secret());
    if let Some(uuid) = uuid {
        vmi["spec"]["domain"]["firmware"]["uuid"] = uuid.into();
    }
    pod.put(vmi);
    Ok((pod, guest))
}

pub(super) fn equal_uuid(ground: &Ground<'_>) -> Result<()> {
    let (victim, guest) = served(ground, "victim", None)?;
    let (attacker, copy) = served(ground, "mallory", Some(&victim.identity.instance_id))?;
    let duel = Duel { what: "two VMIs with one firmware UUID", victim: guest.ns(), attacker: copy.ns() };
    duel.fight(ground)?;
    drop((guest, copy));
    attacker.end()?;
    victim.end()
}

pub(super) fn render_bomb(ground: &Ground<'_>) -> Result<()> {
    let pod = ground.node.pod("renders")?;
    let tap = pod.tap(Shape::default())?;
    ground.wait_for_start();
    for turn in 0_u64.. {
        if ground.is_over() {
            break;
        }
        // A changed record is rendered again.
        let text = format!("# {turn}\n{}", yaml::bomb(yaml::MEDIUM));
        pod.put(pod.vmi(&with_network(&text)));
        let guests = vec![(pod.identity.clone(), Arc::clone(&tap))];
        // The answer does not matter.
        drop(impatient_storm(guests, &["/v1/metadata"], Duration::from_secs(5), Duration::from_secs(2)));
        ground.act();
        ground.sleep(Duration::from_secs(2));
    }
    drop(tap);
    pod.end()
}

pub(super) fn slow_connections(ground: &Ground<'_>) -> Result<()> {
    let (pod, guest) = served(ground, "slow", None)?;
    ground.wait_for_start();
    guest.ns().run_in(|| hold_slowly(ground));
    drop(guest);
    pod.end()
}

/// Holds connections whose requests never end. The calling thread must be in a guest's namespace.
fn hold_slowly(ground: &Ground<'_>) {
    const CONNECTIONS: usize = 140;
    let mut open: Vec<TcpStream> = Vec::new();
    while !ground.is_over() {
        while open.len() < CONNECTIONS && !ground.is_over() {
            let begun = connect().and_then(|mut stream| {
                stream.write_all(b"GET /v1/user-data HTTP/1.1\r\nHost: metadata\r\nX-Slow: ")?;
                stream.set_nonblocking(true)?;
                Ok(stream)
            });
            let Ok(stream) = begun else { break };
            open.push(stream);
            ground.act();
        }
        open.retain_mut(|stream| {
            let closed = matches!(stream.peek(&mut [0]), Ok(0));
            !closed && stream.write_all(b"x").is_ok()
        });
        ground.sleep(Duration::from_secs(1));
    }
}

pub(super) fn equal_uuid_slow(ground: &Ground<'_>) -> Result<()> {
    let (victim, guest) = served(ground, "victim", None)?;
    let (attacker, copy) = served(ground, "mallory", Some(&victim.identity.instance_id))?;
    ground.wait_for_start();
    std::thread::scope(|scope| {
        scope.spawn(|| copy.ns().run_in(|| hold_slowly(ground)));
        let mut found = Findings {
            what: "slow connections of a VM with the victim's UUID",
            shared: ground.attacks,
            known: BTreeSet::new(),
        };
        let mut answered = Instant::now();
        while !ground.is_over() {
            if ask(guest.ns(), "GET /v1/user-data", &[], "").is_ok_and(|answer| answer.status == 200) {
                answered = Instant::now();
            }
            found.check("the victim gets no answer any more", answered.elapsed() > SILENCE);
            ground.sleep(ROUND);
        }
    });
    drop((guest, copy));
    attacker.end()?;
    victim.end()
}

pub(super) fn attributes(ground: &Ground<'_>) -> Result<()> {
    let guests = [served(ground, "writers", None)?, served(ground, "writers", None)?];
    ground.wait_for_start();
    std::thread::scope(|scope| {
        for (_, guest) in &guests {
            scope.spawn(|| {
                guest.ns().run_in(|| {
                    while !ground.is_over() {
                        // A closed or refused connection begins again.
                        if write_attributes(ground).is_err() {
                            ground.sleep(Duration::from_millis(100));
                        }
                    }
                });
            });
        }
    });
    for (pod, guest) in guests {
        drop(guest);
        pod.end()?;
    }
    Ok(())
}

/// Writes attributes on one connection until it ends.
fn write_attributes(ground: &Ground<'_>) -> Result<()> {
    let mut stream = connect()?;
    let (value, mut answer) = ("v".repeat(3_500), [0; 2_048]);
    for number in 0_u64.. {
        if ground.is_over() {
            break;
        }
        let line = format!("PUT /computeMetadata/v1/instance/guest-attributes/soak/k{}", number % 64);
        stream.write_all(request(&line, &[GOOGLE], &value).as_bytes())?;
        let read = stream.read(&mut answer)?;
        ensure!(read > 0, "closed");
        ground.act();
    }
    Ok(())
}
