//! Azure's identity library, unmodified, gets a VM's token, which a JOSE library verifies.

use serde_json::json;
use support::eventually::eventually;
use support::guest::METADATA;
use support::libraries::Libraries;

use super::OLD;
use super::scene::{PATIENCE, Scene, make_key};

/// The audience of `tests/clients/azure.py`.
const RESOURCE: &str = "https://management.azure.com";
const CLIENT: &str = "3f0c4a2e-7f0a-4a4c-9d43-0c8f4b7a1d11";

#[test]
fn azures_library_gets_a_vms_token_of_the_nodes_issuer() {
    let Some(libraries) = Libraries::or_skip() else { return };
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "RS256");
    let agent = scene.lasting_agent("algorithm: RS256, trust_domain: lab.example");
    scene.change_record(0, |record| {
        record["credentials"]["managed_identity"] = json!({ "client_id": CLIENT });
    });
    let guest = &scene.guests()[0];
    let url = format!("http://{METADATA}/metadata/identity/oauth2/token?api-version=2018-02-01&resource=x");
    eventually(PATIENCE, || {
        let answer = guest.curl(&["-H", "Metadata: true", &url], PATIENCE)?;
        anyhow::ensure!(answer.status == 200, "{}: {}", answer.status, answer.text());
        Ok(())
    })
    .expect("the record has an identity");
    let found = libraries.run(guest.ns(), include_str!("../azure.py")).expect("the client answers");
    let token = found["token"].as_str().expect("a token").to_owned();
    let verified = scene.verify(libraries, &agent, &[(&token, RESOURCE), (&token, "another")]);
    let subject = format!("spiffe://lab.example/vm/{}", guest.identity().instance_id);
    assert_eq!(
        (&verified[0]["sub"], &verified[0]["appid"]),
        (&json!(subject), &json!(CLIENT)),
        "{verified:?}"
    );
    assert_eq!(verified[1], json!("InvalidAudienceError"));
}
