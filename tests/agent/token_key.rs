//! `xdp-imds token-key`: nodes with the same key accept each other's tokens, even while the key is being replaced.
//! Errors never contain the key.

use metadata_content::dialect::render;
use metadata_content::http::{Method, StatusCode};
use metadata_content::record::Record;
use metadata_content::store::{Interner, Responses};
use metadata_feed::registry::RecordId;
use metadata_user::agent::NodeState;
use metadata_user::config::Config;
use std::collections::HashSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use support::agent;
use support::question::Question;
use support::record::Identity;

const TOKEN_PATH: &str = "/latest/api/token";
const TTL: &str = "X-aws-ec2-metadata-token-ttl-seconds";
const TOKEN: &str = "X-aws-ec2-metadata-token";

fn token_key(words: &[&str]) -> Output {
    let binary = agent::binary().expect("a binary");
    // The verb needs neither the agent's directories nor its environment variables.
    Command::new(binary).arg("token-key").args(words).env_clear().output().expect("it runs")
}

/// Writes a new key to a file that only its owner can read.
fn make(path: &Path, words: &[&str]) {
    let output = token_key(words);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::write(path, &output.stdout).expect("written");
    fs::set_permissions(path, Permissions::from_mode(0o400)).expect("changed");
}

/// The responses of a VM under an agent with this key in its configuration.
fn node(key: &Path) -> Result<Responses, String> {
    Ok(responses(&state(key)?))
}

/// The state of an agent with this key in its configuration.
fn state(key: &Path) -> Result<NodeState, String> {
    let config = Config { token_key: Some(key.to_owned()), state: None, ..Config::default() };
    NodeState::open(&config).map(|(state, _)| state).map_err(|error| format!("{error:#}"))
}

/// The responses of a VM of an agent.
fn responses(state: &NodeState) -> Responses {
    let (mut record, _) = Record::parse("a.json", &Identity::of(0).record(1)).expect("a record");
    record.serve.imdsv2 = metadata_content::record::Imdsv2::Required;
    render(&record, &mut Interner::new(), state.vm(&RecordId::from("vm.json"), &record))
}

fn token(node: &Responses) -> Vec<u8> {
    let answer = Question::get(TOKEN_PATH).by(Method::Put).with(TTL, "300").now().ask(node);
    assert_eq!(answer.status(), StatusCode(200));
    answer.body().to_bytes().to_vec()
}

fn accepts(node: &Responses, token: &[u8]) -> bool {
    let answer = Question::get("/latest/meta-data/instance-id").with(TOKEN, token).now().ask(node);
    match answer.status() {
        StatusCode(200) => true,
        StatusCode(401) => false,
        other => panic!("{other:?}"),
    }
}

fn room() -> (tempfile::TempDir, [PathBuf; 3]) {
    let room = tempfile::tempdir().expect("a directory");
    let paths = ["first", "second", "other"].map(|name| room.path().join(name));
    (room, paths)
}

#[test]
fn nodes_accept_tokens_of_the_same_key_and_of_no_other() {
    let (_room, [first, _, other]) = room();
    make(&first, &[]);
    make(&other, &[]);
    let [a, b, stranger] = [&first, &first, &other].map(|key| node(key).expect("an agent's state"));
    let token = token(&a);
    assert!(accepts(&a, &token) && accepts(&b, &token));
    assert!(!accepts(&stranger, &token));
}

#[test]
fn a_key_made_after_another_accepts_the_tokens_of_both() {
    let (_room, [first, second, _]) = room();
    make(&first, &[]);
    make(&second, &["--after", first.to_str().expect("UTF-8")]);
    let [old, new] = [&first, &second].map(|key| node(key).expect("an agent's state"));
    assert!(accepts(&new, &token(&old)), "tokens of the old key stay valid");
    assert!(!accepts(&old, &token(&new)), "a node with the old key accepts no token of the new one");
}

#[test]
fn a_file_that_appears_later_is_followed_and_one_that_goes_is_a_problem() {
    let (_room, [first, second, _]) = room();
    let mut late = state(&second).expect("an agent's state");
    let guest = responses(&late);
    make(&first, &[]);
    let token = token(&node(&first).expect("an agent's state"));
    let mut accepts_after = |change: &dyn Fn()| {
        change();
        late.tend(&HashSet::new());
        (accepts(&guest, &token), late.troubles())
    };
    assert_eq!(accepts_after(&|| ()), (false, vec![]), "a key of this node is in use");
    assert_eq!(
        accepts_after(&|| {
            fs::copy(&first, &second).expect("copied");
        }),
        (true, vec![])
    );
    let (accepted, problems) = accepts_after(&|| {
        fs::set_permissions(&second, Permissions::from_mode(0o644)).expect("changed");
    });
    assert!(accepted && problems[0].contains("mode 0644"), "{problems:?}");
    let (accepted, problems) = accepts_after(&|| fs::remove_file(&second).expect("removed"));
    assert!(accepted && problems[0].contains("is missing: restore it"), "{problems:?}");
    let mended = accepts_after(&|| {
        fs::copy(&first, &second).expect("copied");
    });
    assert_eq!(mended, (true, vec![]));
}

#[test]
fn an_invalid_or_readable_key_file_is_refused_without_leaking_it() {
    let (_room, [first, second, missing]) = room();
    make(&first, &[]);
    fs::write(&second, "hunter2 hunter2").expect("written");
    fs::set_permissions(&second, Permissions::from_mode(0o600)).expect("changed");
    let secret = fs::read_to_string(&first).expect("a key");
    let secret = secret.split('"').find(|part| part.len() == 44).expect("32 bytes in base64").to_owned();
    for (path, mode, expected) in [
        (&first, 0o640, "only to its owner, found mode 0640"),
        (&second, 0o600, "found something else"),
        (&missing, 0, "No such file or directory"),
    ] {
        if mode != 0 {
            fs::set_permissions(path, Permissions::from_mode(mode)).expect("changed");
        }
        let output = token_key(&["--after", path.to_str().expect("UTF-8")]);
        let stderr = String::from_utf8(output.stderr).expect("text");
        assert!(!output.status.success() && output.stdout.is_empty(), "{stderr}");
        assert!(stderr.contains(expected), "{stderr}");
        assert!(!stderr.contains("hunter2") && !stderr.contains(&secret), "{stderr}");
        // The agent reports the same errors, except that the file may not exist yet.
        let opened = node(path).map(|_| ());
        assert_eq!(opened.is_err(), mode != 0, "{opened:?}");
        assert!(opened.err().is_none_or(|stderr| stderr.contains(expected) && !stderr.contains(&secret)));
    }
}
