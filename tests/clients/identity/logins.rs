//! VMs log in to Consul by their tokens alone, without a password.

use super::consul::{AUDIENCES, Consul, Program, REFUSED, secret};
use super::scene::{LIFETIME, PATIENCE, Scene, make_key};
use super::{NEWER, OLD};
use std::fs;
use std::time::Duration;
use support::eventually::eventually;

#[test]
fn a_guest_logs_in_to_consul_and_reads_only_what_its_vm_may() {
    let Some(program) = Program::or_skip() else { return };
    for algorithm in ["ES256", "EdDSA", "RS256"] {
        let scene = Scene::new();
        make_key(&scene.keys().join(OLD), algorithm);
        let _agent = scene.lasting_agent(&format!("algorithm: {algorithm}"));
        let consul = Consul::start(&program, &scene);
        let [one, other] = scene.guests() else { panic!("two guests") };
        for (number, guest, stranger) in [(0, one, other), (1, other, one)] {
            let token = consul.log_in(guest, &scene.token(number, AUDIENCES[0])).expect(algorithm);
            let own = consul.read(guest, &token, &secret(guest)).expect(algorithm);
            assert_eq!(own, guest.identity().hostname, "{algorithm}");
            let refused = consul.read(guest, &token, &secret(stranger)).expect_err("a stranger's key");
            assert!(refused.to_string().contains(REFUSED), "{algorithm}: {refused}");
        }
    }
}

#[test]
fn consul_refuses_a_token_for_others_and_one_that_has_ended() {
    let Some(program) = Program::or_skip() else { return };
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "ES256");
    let _agent = scene.agent("algorithm: ES256", &[]);
    let consul = Consul::start(&program, &scene);
    let guest = &scene.guests()[0];
    let refused = consul.log_in(guest, &scene.token(0, "vault")).expect_err("a token for another");
    assert!(refused.to_string().contains("aud claim does not match"), "{refused}");

    let token = scene.token(0, AUDIENCES[0]);
    std::thread::sleep(Duration::from_secs(LIFETIME));
    eventually(PATIENCE, || {
        let refused = consul.log_in(guest, &token).err().map(|error| error.to_string());
        anyhow::ensure!(refused.as_ref().is_some_and(|why| why.contains("token is expired")), "{refused:?}");
        Ok(())
    })
    .expect("the token has ended");
}

#[test]
fn consul_refuses_a_removed_key_once_it_fetches_the_keys_again() {
    let Some(program) = Program::or_skip() else { return };
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "ES256");
    let agent = scene.lasting_agent("algorithm: ES256");
    let consul = Consul::start(&program, &scene);
    let guest = &scene.guests()[0];
    let before = scene.token(0, AUDIENCES[0]);
    consul.log_in(guest, &before).expect("the key is published");

    make_key(&scene.keys().join(NEWER), "ES256");
    fs::remove_file(scene.keys().join(OLD)).expect("removed");
    let removed = super::scene::header(&before)["kid"].clone();
    eventually(PATIENCE, || {
        let keys = scene.published(&agent);
        let keys = keys["keys"].as_array().expect("a list");
        anyhow::ensure!(keys.len() == 1 && keys[0]["kid"] != removed, "{keys:?}");
        Ok(())
    })
    .expect("the removed key is no longer published");
    consul.fetch_keys_again();
    // The guest would get its token of the removed key again for the same audience.
    let after = scene.token(0, AUDIENCES[1]);
    consul.log_in(guest, &after).expect("the new key is published");
    let refused = consul.log_in(guest, &before).expect_err("the key is removed");
    assert!(refused.to_string().contains("failed to verify id token signature"), "{refused}");
}
