//! `xdp-imds identity publish` writes what verifiers fetch, as files and as a ConfigMap.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use support::agent::{self, METRICS};
use support::apiserver::{ApiServer, Manner};
use support::privileged;

use super::scene::{ISSUER, Scene, make_key};
use super::{NEWER, OLD};

fn publish(config: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(agent::binary().expect("the agent is built"));
    command.args(["identity", "publish", "--config"]).arg(config).args(words).output().expect("the verb runs")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&*output.stdout, &*output.stderr].concat()).into_owned()
}

/// Creates a directory of two keys, and a configuration that names it.
fn keys() -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    let keys = directory.path().join("keys");
    fs::create_dir(&keys).expect("a directory");
    for name in [OLD, NEWER] {
        make_key(&keys.join(name), "ES256");
    }
    let config = format!("identity: {{issuer: '{ISSUER}', keys: '{}'}}\n", keys.display());
    fs::write(directory.path().join("config.yaml"), config).expect("written");
    directory
}

#[test]
fn metadata_and_keys_are_published_as_files() {
    let directory = keys();
    let config = directory.path().join("config.yaml");
    let out = directory.path().display().to_string();
    let output = publish(&config, &["--out", &out]);
    assert!(output.status.success(), "{}", said(&output));
    let read = |name: &str| -> Value {
        serde_json::from_str(&fs::read_to_string(directory.path().join(name)).expect("a file")).expect("JSON")
    };
    let (metadata, keys) = (read("openid-configuration"), read("jwks.json"));
    assert_eq!(metadata["issuer"], json!(ISSUER));
    assert_eq!(metadata["jwks_uri"], json!(format!("{ISSUER}/.well-known/jwks.json")));
    let keys = keys["keys"].as_array().expect("a list");
    assert!(keys.len() == 2 && keys.iter().all(|key| key.get("d").is_none()), "{keys:?}");
    fs::remove_dir_all(directory.path().join("keys")).expect("removed");
    fs::create_dir(directory.path().join("keys")).expect("a directory");
    let refused = publish(&config, &["--out", &out]);
    assert!(!refused.status.success() && said(&refused).contains("expected a key"), "{}", said(&refused));
    assert_eq!(read("jwks.json")["keys"].as_array().map(Vec::len), Some(2), "the last set stays");
}

#[test]
fn a_config_map_is_applied_or_the_missing_permission_named() {
    let (directory, server) = (keys(), ApiServer::start().expect("a server"));
    let config = directory.path().join("config.yaml");
    let kubeconfig = directory.path().join("kubeconfig");
    server.write_kubeconfig(&kubeconfig).expect("a kubeconfig");
    let kubeconfig = kubeconfig.display().to_string();
    let words = ["--config-map", "ns/keys", "--kubeconfig", &kubeconfig];
    let output = publish(&config, &words);
    assert!(output.status.success(), "{}", said(&output));
    let map = server.config_map("ns/keys").expect("a ConfigMap");
    let keys: Value = serde_json::from_str(map["data"]["jwks.json"].as_str().expect("a text")).expect("JSON");
    assert_eq!(keys["keys"].as_array().map(Vec::len), Some(2), "{map}");
    assert!(map["data"]["openid-configuration"].as_str().is_some_and(|text| text.contains(ISSUER)), "{map}");
    server.behave(Manner::Forbidding);
    let refused = publish(&config, &words);
    assert!(!refused.status.success() && said(&refused).contains("may `patch` it"), "{}", said(&refused));
}

#[test]
fn keys_are_fetched_from_agents_by_those_who_have_no_private_key() {
    if !privileged::or_skip() {
        return;
    }
    let scene = Scene::new();
    make_key(&scene.keys().join(OLD), "ES256");
    let agent = scene.agent("algorithm: ES256", &[]);
    let directory = keys();
    let out = directory.path().display().to_string();
    let url = format!("http://{METRICS}/.well-known/jwks.json");
    let output =
        scene.node().run_in(|| publish(&directory.path().join("config.yaml"), &["--out", &out, &url]));
    assert!(output.status.success(), "{}", said(&output));
    let published = fs::read_to_string(directory.path().join("jwks.json")).expect("a file");
    let published: Value = serde_json::from_str(&published).expect("JSON");
    assert_eq!(published, scene.published(&agent));
}
