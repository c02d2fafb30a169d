//! With a trust domain, a VM's token is a JWT-SVID to SPIFFE's own library.

use super::OLD;
use super::scene::{AUDIENCE, PATIENCE, Scene, make_key, part, with_input};
use serde_json::{Value, json};
use std::fs;
use std::process::Command;
use support::agent::{self, Agent};
use support::eventually::eventually;
use support::libraries::Libraries;
use support::privileged;

const DOMAIN: &str = "lab.example";

/// Runs `identity jwks --spiffe` on the keys that a node publishes. Returns its output, or its error.
fn bundle(scene: &Scene, agent: &Agent<'_>) -> Result<Value, String> {
    let set = scene.keys().join("jwks.json");
    fs::write(&set, scene.published(agent).to_string()).expect("written");
    let mut command = Command::new(agent::binary().expect("the agent is built"));
    let output = command.args(["identity", "jwks", "--spiffe"]).arg(&set).output().expect("the verb runs");
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(serde_json::from_slice(&output.stdout).expect("JSON"))
}

#[test]
fn a_vms_token_is_a_jwt_svid_of_its_trust_domain_only() {
    let Some(libraries) = Libraries::or_skip() else { return };
    for algorithm in ["ES256", "RS256"] {
        let scene = Scene::new();
        make_key(&scene.keys().join(OLD), algorithm);
        let agent = scene.lasting_agent(&format!("algorithm: {algorithm}, trust_domain: {DOMAIN}"));
        scene.change_record(1, |record| record["identity"] = json!({"subject": "ns/{project}/vm/{name}"}));
        let named = format!("spiffe://{DOMAIN}/ns/lab/vm/{}", scene.guests()[1].identity().hostname);
        let by_name = eventually(PATIENCE, || {
            let token = scene.token(1, AUDIENCE);
            let subject = &part(&token, 1)["sub"];
            anyhow::ensure!(*subject == json!(named), "{subject}");
            Ok(token)
        });
        let (by_uuid, by_name) = (scene.token(0, AUDIENCE), by_name.expect("the record sets the subject"));

        let bundle = bundle(&scene, &agent).expect("a bundle");
        assert_eq!(bundle["keys"][0]["use"], json!("jwt-svid"), "{bundle}");
        let asked = [
            (DOMAIN, &by_uuid, AUDIENCE),
            (DOMAIN, &by_name, AUDIENCE),
            ("other.example", &by_uuid, AUDIENCE),
            (DOMAIN, &by_uuid, "another"),
        ];
        let script =
            with_input(&json!({ "bundle": bundle, "asked": asked }), include_str!("../spiffe_verifier.py"));
        let found = libraries.run(scene.node(), &script).expect("the verifier answers");
        let uuid = format!("spiffe://{DOMAIN}/vm/{}", scene.guests()[0].identity().instance_id);
        assert_eq!(found, json!([uuid, named, "InvalidTokenError", "InvalidTokenError"]), "{algorithm}");
    }
}

#[test]
fn no_spiffe_bundle_is_made_of_keys_that_spiffe_forbids() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "EdDSA");
    let agent = scene.lasting_agent(&format!("algorithm: EdDSA, trust_domain: {DOMAIN}"));
    let error = bundle(&scene, &agent).expect_err("no EdDSA");
    assert!(error.contains("set `identity.algorithm` to ES256"), "{error}");
}
