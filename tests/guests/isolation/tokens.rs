//! A token is valid only unchanged, for its VM and dialect, until it expires.

use anyhow::{Result, ensure};
use metadata_content::http::Method;
use serde_json::json;
use std::time::Duration;
use support::agent::PortArgument;
use support::privileged;
use support::question::{Question, TOKENS};
use support::station::Station;
use support::tap::Shape;

use super::vm::{Node, SPY, VICTIM, Vm, ask, tokens};

/// Base64's alphabet (RFC 4648 §4).
const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Tokens that differ slightly from this one.
fn near(token: &str) -> Vec<(String, String)> {
    let mut tokens = Vec::new();
    for at in 0..token.len() {
        let value = ALPHABET.iter().position(|byte| *byte == token.as_bytes()[at]).expect("base64");
        for bit in 0..6 {
            let mut bytes = token.as_bytes().to_vec();
            bytes[at] = ALPHABET[value ^ 1 << bit];
            let name = format!("bit {bit} of character {at}");
            tokens.push((name, String::from_utf8(bytes).expect("base64 is text")));
        }
    }
    let swapped = token.chars().rev().collect();
    tokens.extend([
        ("nothing".into(), String::new()),
        ("one character less".into(), token[1..].into()),
        ("four characters less".into(), token[..token.len() - 4].into()),
        ("one character more".into(), format!("{token}A")),
        ("itself twice".into(), format!("{token}{token}")),
        ("itself twice in a list".into(), format!("{token}, {token}")),
        ("backwards".into(), swapped),
        ("padding".into(), "=".repeat(token.len())),
        ("zeroes".into(), "A".repeat(token.len())),
        ("in other case".into(), token.chars().map(flip_case).collect()),
    ]);
    tokens.retain(|(_, other)| other != token);
    tokens
}

fn flip_case(letter: char) -> char {
    if letter.is_ascii_lowercase() { letter.to_ascii_uppercase() } else { letter.to_ascii_lowercase() }
}

/// Sends a token in a field, and checks for a short refusal.
fn ensure_refused(station: &mut Station, question: &Question, field: &str, token: &str) -> Result<()> {
    let (status, body) = ask(station, question, &[(field, token)])?;
    ensure!(matches!(status, 400 | 401 | 403), "answered {status}");
    ensure!(body.len() < 256, "{} bytes of refusal", body.len());
    Ok(())
}

#[test]
fn a_guessed_stolen_or_expired_token_is_refused_in_every_dialect() {
    if !privileged::or_skip() {
        return;
    }
    let node = Node::new().expect("a node");
    for vm in [SPY, VICTIM] {
        vm.write(node.records.path(), |record| record["serve"]["imdsv2"] = json!("required"))
            .expect("a record");
    }
    let station =
        |name, vm: Vm| node.station(name, vm.mac(0), vm.address(), Shape::default()).expect("a tap");
    let (mut spy, mut victim) = (station("tap0", SPY), station("tap1", VICTIM));
    let ports = [PortArgument::new("tap0", SPY.mac(0)), PortArgument::new("tap1", VICTIM.mac(0))];
    let _agent = node.agent(&ports).expect("an agent");

    let short = tokens(&mut spy, 1).expect("tokens for a second");
    let own = tokens(&mut spy, 300).expect("tokens");
    let stolen = tokens(&mut victim, 300).expect("tokens of the victim");
    std::thread::sleep(Duration::from_millis(2_100));
    for (at, (question, field, token)) in own.iter().enumerate() {
        let is_good = |station: &mut Station, token: &str| {
            ask(station, question, &[(field, token)]).expect("an answer").0 == 200
        };
        assert!(is_good(&mut spy, token), "{field}: its own token");
        assert!(is_good(&mut victim, &stolen[at].2), "{field}: the victim's token, by the victim");
        let mut others: Vec<(String, String)> = near(token);
        others.push(("the victim's".into(), stolen[at].2.clone()));
        others.push(("an expired one".into(), short[at].2.clone()));
        for (other, (_, of, token)) in own.iter().enumerate().filter(|(other, _)| *other != at) {
            others.push((format!("one for {of}"), token.clone()));
            others.push((format!("the victim's for {of}"), stolen[other].2.clone()));
        }
        for (name, token) in others {
            ensure_refused(&mut spy, question, field, &token)
                .unwrap_or_else(|error| panic!("{field}: {name}: {error:#}"));
        }
        assert!(is_good(&mut spy, token), "{field}: its own token, at the end");
    }
}

#[test]
fn no_token_is_issued_for_a_forwarded_request() {
    if !privileged::or_skip() {
        return;
    }
    let node = Node::new().expect("a node");
    SPY.write(node.records.path(), |_| ()).expect("a record");
    let mut spy = node.station("tap0", SPY.mac(0), SPY.address(), Shape::default()).expect("a tap");
    let _agent = node.agent(&[PortArgument::new("tap0", SPY.mac(0))]).expect("an agent");
    for (host, field, path, age) in TOKENS {
        for name in ["X-Forwarded-For", "x-forwarded-for", "X-FORWARDED-FOR"] {
            for value in ["10.0.0.1", "", "unknown"] {
                let put = Question::get(path).by(Method::Put).at(host).with(age, "300");
                let (status, body) = ask(&mut spy, &put, &[(name, value)]).expect("an answer");
                assert_eq!(status, 403, "{field}: {name}: {value:?}: {:?}", String::from_utf8_lossy(&body));
            }
        }
    }
}
