//! A VM proves to others who it is: tokens from its guest verify against the node's published keys by a library that
//! knows nothing else, and no key leaves the signer.

mod authority;
mod azure;
mod consul;
mod documents;
mod google;
mod logins;
mod publish;
mod scene;
mod spiffe;
mod takeover;

use scene::{AUDIENCE, ISSUER, LIFETIME, PATIENCE, Scene, make_key};
use serde_json::{Value, json};
use std::fs;
use std::time::{Duration, Instant};
use support::eventually::eventually;
use support::exposition::{self, sum};
use support::libraries::Libraries;
use support::privileged;
use support::process;

/// A time far enough in the past that a key signs at once.
const OLD: &str = "20260101T000000Z.pem";
/// A later time, also in the past.
const NEWER: &str = "20260201T000000Z.pem";

#[test]
fn a_guests_token_verifies_against_the_published_keys_in_every_algorithm() {
    let Some(libraries) = Libraries::or_skip() else { return };
    for algorithm in ["ES256", "EdDSA", "RS256"] {
        let scene = Scene::new();
        make_key(&scene.keys().join(OLD), algorithm);
        let agent = scene.agent(&format!("algorithm: {algorithm}, trust_domain: lab.example"), &[]);
        let tokens = [scene.token(0, AUDIENCE), scene.token(1, AUDIENCE)];
        let asked = [(&tokens[0], AUDIENCE), (&tokens[1], AUDIENCE), (&tokens[0], "another")];
        let found = scene.verify(libraries, &agent, &asked);
        for (n, guest) in scene.guests().iter().enumerate() {
            let identity = guest.identity();
            let subject = format!("spiffe://lab.example/vm/{}", identity.instance_id);
            assert_eq!(found[n]["sub"], json!(subject), "{algorithm}: {}", found[n]);
            let vm = &found[n]["vm"];
            assert_eq!((&vm["uuid"], &vm["name"]), (&json!(identity.instance_id), &json!(identity.hostname)));
            assert_eq!(vm["nic"], json!({"id": "n0", "mac": identity.mac.to_string()}));
            let seconds = |claim: &str| found[n][claim].as_u64().expect("a time");
            assert_eq!(seconds("exp") - seconds("iat"), LIFETIME);
        }
        assert_eq!(found[2], json!("InvalidAudienceError"));
        let (status, text) = agent.ask("/.well-known/openid-configuration").expect("the issuer's metadata");
        let document: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((status, &document["issuer"]), (200, &json!(ISSUER)));
        assert_eq!(document["id_token_signing_alg_values_supported"], json!([algorithm]));
    }
}

#[test]
fn a_request_without_field_or_audience_or_through_a_proxy_gets_no_token() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "ES256");
    let agent = scene.agent("algorithm: ES256", &[]);
    let field = ["-H", "Metadata: true"];
    let proxied = ["-H", "Metadata: true", "-H", "X-Forwarded-For: 10.0.0.1"];
    let cases: [(&[&str], &str, u16); 5] = [
        (&field, "?audience=vault", 200),
        (&field, "", 400),
        (&field, "?audience=a&audience=b", 400),
        (&[], "?audience=vault", 400),
        (&proxied, "?audience=vault", 403),
    ];
    for (words, query, status) in cases {
        assert_eq!(scene.ask(0, words, query).0, status, "{words:?} {query}");
    }
    scene.change_record(1, |record| record["identity"] = json!({"audiences": ["vault"]}));
    let changed = eventually(PATIENCE, || {
        let (status, body) = scene.ask(1, &field, "?audience=other");
        anyhow::ensure!(status == 403, "{status}: {body}");
        Ok(())
    });
    changed.expect("the record lists one audience");
    assert_eq!(scene.ask(1, &field, "?audience=vault").0, 200);
    drop(agent);
}

#[test]
fn tokens_of_a_replaced_key_verify_to_their_end_and_not_after() {
    let Some(libraries) = Libraries::or_skip() else { return };
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "ES256");
    let agent = scene.agent("algorithm: ES256", &[]);
    let begun = Instant::now();
    let before = scene.token(0, "before");
    make_key(&scene.keys().join(NEWER), "ES256");
    eventually(PATIENCE, || {
        let keys = scene.published(&agent);
        anyhow::ensure!(keys["keys"].as_array().is_some_and(|keys| keys.len() == 2), "{keys}");
        Ok(())
    })
    .expect("both keys are published");
    let after = scene.token(0, "after");
    let asked = [(&before, "before"), (&after, "after")];
    let found = scene.verify(libraries, &agent, &asked);
    let is_early = begun.elapsed() < Duration::from_secs(LIFETIME);
    if is_early {
        assert!(found[0].is_object() && found[1].is_object(), "{found:?}");
    }
    let kid = |token: &str| scene::header(token)["kid"].clone();
    assert_ne!(kid(&before), kid(&after), "the new key signs");
    std::thread::sleep(Duration::from_secs(LIFETIME + 1).saturating_sub(begun.elapsed()));
    let found = scene.verify(libraries, &agent, &asked);
    assert_eq!(found[0], json!("ExpiredSignatureError"));
    fs::remove_file(scene.keys().join(OLD)).expect("removed");
    eventually(PATIENCE, || {
        let found = scene.verify(libraries, &agent, &asked);
        anyhow::ensure!(found[0] == json!("KeyError"), "{found:?}");
        Ok(())
    })
    .expect("a removed key is no longer published");
}

#[test]
fn without_its_signer_the_agent_serves_all_but_tokens_and_says_so() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "ES256");
    let agent = scene.agent("algorithm: ES256", &[]);
    let up = |agent: &support::agent::Agent<'_>| {
        let (_, text) = agent.ask("/metrics")?;
        sum(&exposition::read(&text)?, "xdp_imds_identity_signer_up", &[])
    };
    assert_eq!(up(&agent).expect("a gauge"), 1.0);
    process::signal(scene.signer(&agent), libc::SIGKILL).expect("a signal");
    eventually(PATIENCE, || {
        anyhow::ensure!(up(&agent)? == 0.0, "the signer counts as up");
        Ok(())
    })
    .expect("the metrics say so");
    assert!(agent.eventually_logs("the signer of identity tokens has ended"), "{}", agent.log());
    let (status, body) = scene.ask(0, &["-i", "-H", "Metadata: true"], "?audience=vault");
    assert_eq!(status, 503, "{body}");
    assert!(body.to_lowercase().contains("retry-after: 1"), "{body}");
    scene.guests()[0].fetch_own("/v1/user-data", PATIENCE).expect("its user-data");
    assert!(scene.status().contains("the signer of identity tokens has ended"), "{}", scene.status());
}

#[test]
fn an_agent_without_a_key_does_not_start_and_names_the_remedy() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new();
    let error = scene.try_agent("algorithm: ES256", &[]).expect_err("no key").to_string();
    assert!(error.contains("for ES256") && error.contains("make one by `xdp-imds identity key "), "{error}");
}

#[test]
fn no_key_is_in_the_agents_memory_log_audit_or_answers() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new();
    let secret = make_key(&scene.keys().join(OLD), "EdDSA");
    let agent = scene.agent("algorithm: EdDSA", &["--log", "trace", "--audit", &scene.audit()]);
    let token = scene.token(0, AUDIENCE);
    let published = scene.published(&agent);
    let kid = published["keys"][0]["kid"].as_str().expect("a kid").to_owned();
    let found = scene::in_memory(agent.pid(), &[kid.as_bytes(), secret.text.as_bytes(), &secret.bytes]);
    assert_eq!(found, [true, false, false], "the search finds a public value and no private one");

    let audit = eventually(PATIENCE, || {
        let audit = fs::read_to_string(scene.audit())?;
        anyhow::ensure!(audit.contains("\"subject\""), "{audit}");
        Ok(audit)
    })
    .expect("an audit line for the token");
    let line = audit.lines().find(|line| line.contains("\"subject\"")).expect("a line");
    let line: Value = serde_json::from_str(line).expect("JSON");
    assert_eq!((&line["audience"], &line["key"]), (&json!(AUDIENCE), &json!(kid)));
    let (_, metrics) = agent.ask("/metrics").expect("metrics");
    let signature = token.rsplit('.').next().expect("a signature");
    for (name, text) in
        [("log", agent.log()), ("audit", audit), ("metrics", metrics), ("keys", published.to_string())]
    {
        assert!(!text.is_empty() && !text.contains(&secret.text), "{name}: {text}");
        assert!(!text.contains(signature), "the {name} has a token");
    }
}
