//! Google's auth library, unmodified, fetches a VM's token and verifies it.

use super::OLD;
use super::scene::{AUDIENCE, ISSUER, PATIENCE, Scene, make_key, with_input};
use serde_json::{Value, json};
use support::eventually::eventually;
use support::libraries::Libraries;

/// The URL at which the node publishes its keys, inside its namespace.
const KEYS: &str = "http://127.0.0.1:9253/.well-known/jwks.json";
const EMAIL: &str = "web@lab.example";

/// Gives the VM an account without a token, and waits until the guest sees it.
fn give_account(scene: &Scene) {
    scene.change_record(0, |record| {
        record["credentials"]["service_account"] = json!({"name": "web", "email": EMAIL});
    });
    let url = "http://169.254.169.254/computeMetadata/v1/instance/service-accounts/default/email";
    eventually(PATIENCE, || {
        let email = scene.guests()[0].curl(&["-H", "Metadata-Flavor: Google", url], PATIENCE)?;
        anyhow::ensure!(email.text() == EMAIL, "{}: {}", email.status, email.text());
        Ok(())
    })
    .expect("the record has an account");
}

#[test]
fn googles_library_fetches_a_vms_identity_token_and_verifies_it() {
    let Some(libraries) = Libraries::or_skip() else { return };
    for algorithm in ["ES256", "RS256"] {
        let scene = Scene::new();
        make_key(&scene.keys().join(OLD), algorithm);
        let _agent = scene.lasting_agent(&format!("algorithm: {algorithm}, trust_domain: lab.example"));
        give_account(&scene);
        let guest = &scene.guests()[0];
        let script = with_input(&json!({ "audience": AUDIENCE }), include_str!("../google_identity.py"));
        let token = libraries.run(guest.ns(), &script).expect("the client gets a token");

        let input = json!({ "token": token, "audiences": [AUDIENCE, "another"], "keys": KEYS });
        let script = with_input(&input, include_str!("../google_verifier.py"));
        let found = libraries.run(scene.node(), &script).expect("the verifier answers");
        let claims = &found[0];
        let subject = format!("spiffe://lab.example/vm/{}", guest.identity().instance_id);
        let expected = [
            ("iss", json!(ISSUER)),
            ("aud", json!(AUDIENCE)),
            ("sub", json!(subject)),
            ("email", json!(EMAIL)),
            ("email_verified", Value::Bool(true)),
        ];
        for (claim, value) in expected {
            assert_eq!(claims[claim], value, "{algorithm}: {claim} of {claims}");
        }
        assert_eq!(claims["google"]["compute_engine"]["instance_name"], json!(guest.identity().hostname));
        assert_eq!(found[1], json!("InvalidAudienceError"), "{algorithm}");
    }
}
