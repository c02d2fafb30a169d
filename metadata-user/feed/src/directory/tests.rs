//! What the feed of a directory publishes.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tokio::sync::mpsc;

use super::{load, names, watch, watch_at_most};
use crate::memory_budget::{MemoryBudget, Weight};
use crate::publisher::Publisher;
use crate::registry::RecordId;
use crate::{FeedError, FeedEvent};
use metadata_content::record::{Record, RecordLimits};
use metadata_content::source::RecordSource;

const FULL: &str = include_str!("../../../../tests/vectors/record.yaml");
/// Keys as AWS returns them.
const AWS_KEYS: &str =
    r#"{"AccessKeyId": "a", "SecretAccessKey": "s", "Token": "t", "Expiration": "2099-01-01T00:00:00Z"}"#;
/// Ample time for any expected event.
const PATIENCE: Duration = Duration::from_secs(20);

fn named(name: &str) -> String {
    FULL.replacen("name: web-1", &format!("name: {name}"), 1)
}

/// Writes a file as writers should: elsewhere, then renamed into place.
fn put(dir: &Path, name: &str, text: &str) {
    let draft = dir.join(format!(".{name}.draft"));
    fs::write(&draft, text).expect("the draft is written");
    fs::rename(draft, dir.join(name)).expect("the draft is renamed");
}

struct Feed {
    events: mpsc::Receiver<FeedEvent>,
}

impl Feed {
    fn start(dir: &Path) -> Self {
        let (tx, events) = mpsc::channel(4);
        tokio::spawn(watch(dir.to_owned(), RecordLimits::DEFAULT, tx));
        Self { events }
    }

    /// The next event, abbreviated: `+key=vm name`, `-key`, `!key`, `.`.
    async fn next(&mut self) -> String {
        let event = tokio::time::timeout(PATIENCE, self.events.recv()).await.expect("an event comes");
        match event.expect("the feed runs") {
            FeedEvent::Upsert { key, record } => format!("+{key}={}", record.vm.name),
            FeedEvent::Remove { key } => format!("-{key}"),
            FeedEvent::Rejected { key, .. } => format!("!{key}"),
            FeedEvent::Expect { key, .. } => panic!("{key} is expected, and a file is there or not"),
            FeedEvent::RemoveUnless { key, .. } => panic!("{key} may go, and a file is there or not"),
            FeedEvent::Synced => ".".into(),
        }
    }

    async fn expect(&mut self, wanted: &[&str]) {
        for wanted in wanted {
            assert_eq!(self.next().await, *wanted);
        }
    }
}

fn dir() -> TempDir {
    tempfile::tempdir().expect("a directory is made")
}

#[tokio::test]
async fn existing_records_are_published_before_synced_and_other_files_never() {
    let dir = dir();
    for name in ["b.yaml", "a.json.yml", ".hidden.yaml", "c.yaml~", "c.yaml.swp", "#c.yaml#", "README"] {
        put(dir.path(), name, &named("vm"));
    }
    put(dir.path(), "z.yaml", "schema: 1\n");
    fs::create_dir(dir.path().join("d")).expect("a directory is made");
    Feed::start(dir.path()).expect(&["+a.json.yml=vm", "+b.yaml=vm", "!z.yaml", "."]).await;
}

#[tokio::test]
async fn changes_are_published_however_they_are_written() {
    let dir = dir();
    let mut feed = Feed::start(dir.path());
    feed.expect(&["."]).await;
    put(dir.path(), "a.yaml", &named("renamed"));
    feed.expect(&["+a.yaml=renamed"]).await;
    fs::write(dir.path().join("a.yaml"), named("in-place")).expect("the record is written");
    feed.expect(&["+a.yaml=in-place"]).await;
    fs::rename(dir.path().join("a.yaml"), dir.path().join("b.yaml")).expect("the record is renamed");
    feed.expect(&["-a.yaml", "+b.yaml=in-place"]).await;
    fs::remove_file(dir.path().join("b.yaml")).expect("the record is removed");
    feed.expect(&["-b.yaml"]).await;
    let elsewhere = tempfile::NamedTempFile::new().expect("a file is made");
    fs::write(elsewhere.path(), named("linked")).expect("the record is written");
    symlink(elsewhere.path(), dir.path().join("l.yaml")).expect("a link is made");
    feed.expect(&["+l.yaml=linked"]).await;
}

#[tokio::test]
async fn a_record_written_slowly_in_place_is_published_whole() {
    use std::io::Write as _;
    let dir = dir();
    put(dir.path(), "a.yaml", &named("before"));
    let mut feed = Feed::start(dir.path());
    feed.expect(&["+a.yaml=before", "."]).await;
    // The first half alone is a good record of a VM without user-data.
    let text = named("after");
    let (half, rest) = text.split_at(text.find("user_data:").expect("the full record has user-data"));
    Record::parse("half.yaml", half).expect("half of it is a good record");
    let mut file = fs::File::create(dir.path().join("a.yaml")).expect("the record is truncated");
    file.write_all(half.as_bytes()).expect("half of it is written");
    put(dir.path(), "b.yaml", &named("other"));
    feed.expect(&["+b.yaml=other"]).await;
    file.write_all(rest.as_bytes()).expect("the rest is written");
    drop(file);
    let event = tokio::time::timeout(PATIENCE, feed.events.recv()).await.expect("an event comes");
    let Some(FeedEvent::Upsert { key, record }) = event else { panic!("{event:?}") };
    assert_eq!((key.as_str(), record.vm.name.as_str()), ("a.yaml", "after"));
    assert!(record.user_data.is_some() && record.serve.dialects.is_none());
}

#[tokio::test]
async fn a_bad_file_is_rejected_and_the_last_good_record_stays() {
    let dir = dir();
    put(dir.path(), "a.yaml", &named("good"));
    let mut feed = Feed::start(dir.path());
    feed.expect(&["+a.yaml=good", "."]).await;
    put(dir.path(), "a.yaml", "schema: [");
    feed.expect(&["!a.yaml"]).await;
    fs::write(dir.path().join("a.yaml"), [0xff, 0xfe]).expect("the record is written");
    feed.expect(&["!a.yaml"]).await;
    put(dir.path(), "a.yaml", &named("mended"));
    feed.expect(&["+a.yaml=mended"]).await;
}

#[tokio::test]
async fn what_is_no_file_is_refused_and_never_waited_for() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    let dir = dir();
    let make = |name: &str, kind| mknodat(CWD, dir.path().join(name), kind, Mode::RUSR, 0).expect(name);
    make("a.yaml", FileType::Fifo);
    let mut feed = Feed::start(dir.path());
    feed.expect(&["!a.yaml", "."]).await;
    for (name, kind) in [("b.yaml", FileType::Fifo), ("c.yaml", FileType::Socket)] {
        make(name, kind);
        feed.expect(&[&format!("!{name}")]).await;
    }
    fs::create_dir(dir.path().join("d.yaml")).expect("a directory is made");
    feed.expect(&["!d.yaml"]).await;
    fs::remove_file(dir.path().join("a.yaml")).expect("the FIFO is removed");
    feed.expect(&["-a.yaml"]).await;
}

#[tokio::test]
async fn an_unchanged_record_is_not_published_again() {
    let dir = dir();
    put(dir.path(), "a.yaml", &named("same"));
    let mut feed = Feed::start(dir.path());
    feed.expect(&["+a.yaml=same", "."]).await;
    put(dir.path(), "a.yaml", &named("same"));
    put(dir.path(), "b.yaml", &named("other"));
    feed.expect(&["+b.yaml=other"]).await;
}

#[tokio::test]
async fn a_directory_that_replaces_another_is_compared_with_it() {
    let parent = dir();
    let (live, next) = (parent.path().join("live"), parent.path().join("next"));
    for (dir, names) in [(&live, ["gone", "kept"]), (&next, ["kept", "new"])] {
        fs::create_dir(dir).expect("a directory is made");
        for name in names {
            put(dir, &format!("{name}.yaml"), &named(name));
        }
    }
    let mut feed = Feed::start(&live);
    feed.expect(&["+gone.yaml=gone", "+kept.yaml=kept", "."]).await;
    fs::rename(&live, parent.path().join("old")).expect("the directory is moved");
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(feed.events.try_recv().is_err(), "records are withdrawn while the directory is unavailable");
    fs::rename(&next, &live).expect("the other directory is moved");
    feed.expect(&["-gone.yaml", "+new.yaml=new", "."]).await;
    put(&live, "later.yaml", &named("later"));
    feed.expect(&["+later.yaml=later"]).await;
}

#[tokio::test]
async fn a_deleted_directory_is_watched_again_once_it_is_back() {
    let parent = dir();
    let live = parent.path().join("live");
    fs::create_dir(&live).expect("a directory is made");
    put(&live, "a.yaml", &named("before"));
    let mut feed = Feed::start(&live);
    feed.expect(&["+a.yaml=before", "."]).await;
    fs::rename(live.join("a.yaml"), parent.path().join("a.yaml")).expect("the record is moved out");
    feed.expect(&["-a.yaml"]).await;
    fs::remove_dir(&live).expect("the directory is removed");
    tokio::time::sleep(Duration::from_millis(200)).await;
    fs::create_dir(&live).expect("a directory is made");
    put(&live, "a.yaml", &named("after"));
    feed.expect(&["+a.yaml=after", "."]).await;
}

#[tokio::test]
async fn a_mounted_config_map_is_reread_when_kubernetes_swaps_its_data() {
    let dir = dir();
    for version in ["1", "2"] {
        let data = dir.path().join(format!("..{version}"));
        fs::create_dir(&data).expect("a directory is made");
        fs::write(data.join("a.yaml"), named(&format!("v{version}"))).expect("a record is written");
    }
    symlink("..1", dir.path().join("..data")).expect("a link is made");
    symlink("..data/a.yaml", dir.path().join("a.yaml")).expect("a link is made");
    let mut feed = Feed::start(dir.path());
    feed.expect(&["+a.yaml=v1", "."]).await;
    symlink("..2", dir.path().join("..data_tmp")).expect("a link is made");
    fs::rename(dir.path().join("..data_tmp"), dir.path().join("..data")).expect("the link is renamed");
    feed.expect(&["+a.yaml=v2", "."]).await;
}

#[tokio::test]
async fn a_link_that_leads_nowhere_is_a_broken_record_until_it_leads_to_one() {
    let (elsewhere, dir) = (dir(), dir());
    let target = elsewhere.path().join("a.yaml");
    symlink(&target, dir.path().join("a.yaml")).expect("a link is made");
    let loaded = load(dir.path(), "a.yaml", &RecordLimits::DEFAULT).expect("a record that cannot be used");
    let error = loaded.record.expect_err("it leads nowhere").to_string();
    assert!(error.contains(&target.display().to_string()) && error.contains("remove the link"), "{error}");
    // Beside the agent the file may be there.
    symlink("/run/user/no-such/b.yaml", dir.path().join("b.yaml")).expect("a link is made");
    let hidden = load(dir.path(), "b.yaml", &RecordLimits::DEFAULT).expect("a record that cannot be used");
    let error = hidden.record.expect_err("it leads nowhere").to_string();
    assert!(error.contains("does not exist for the agent") && error.contains("ProtectHome=yes"), "{error}");
    fs::remove_file(dir.path().join("b.yaml")).expect("the link is removed");
    let mut feed = Feed::start(dir.path());
    feed.expect(&["!a.yaml", "."]).await;
    // The feed watches no other directory.
    fs::write(&target, named("linked")).expect("a record is written");
    feed.expect(&["+a.yaml=linked"]).await;
    fs::remove_file(dir.path().join("a.yaml")).expect("the link is removed");
    feed.expect(&["-a.yaml"]).await;
}

#[tokio::test]
async fn a_link_of_a_config_map_that_dangles_for_a_moment_leaves_the_last_good_record() {
    let dir = dir();
    fs::create_dir(dir.path().join("..1")).expect("a directory is made");
    fs::create_dir(dir.path().join("..2")).expect("a directory is made");
    fs::write(dir.path().join("..1/a.yaml"), named("v1")).expect("a record is written");
    let swap = |version: &str| {
        symlink(version, dir.path().join("..data_tmp")).expect("a link is made");
        fs::rename(dir.path().join("..data_tmp"), dir.path().join("..data")).expect("the link is renamed");
    };
    swap("..1");
    symlink("..data/a.yaml", dir.path().join("a.yaml")).expect("a link is made");
    let mut feed = Feed::start(dir.path());
    feed.expect(&["+a.yaml=v1", "."]).await;
    swap("..2");
    feed.expect(&["!a.yaml", "."]).await;
    swap("..1");
    feed.expect(&["+a.yaml=v1", "."]).await;
    // kubelet removes the link of a key that is gone after it has swapped the data.
    swap("..2");
    feed.expect(&["!a.yaml", "."]).await;
    fs::remove_file(dir.path().join("a.yaml")).expect("the link is removed");
    feed.expect(&["-a.yaml"]).await;
}

/// A record with its user-data in a file.
fn sourced(file: &str) -> String {
    let inline = "user_data: {text: \"#cloud-config\\nruncmd:\\n- [touch, /run/ud-ok]\\n\"}";
    assert!(FULL.contains(inline), "the record has changed");
    FULL.replacen(inline, &format!("user_data: {{source: {{file: {file}}}}}"), 1)
}

#[tokio::test]
async fn user_data_is_read_again_when_its_file_changes() {
    let dir = dir();
    put(dir.path(), "a.yaml", &sourced("a.user-data"));
    let mut feed = Feed::start(dir.path());
    feed.expect(&["!a.yaml", "."]).await;
    for bytes in [b"\0\xff\x01".as_slice(), b"two"] {
        fs::write(dir.path().join("a.user-data"), bytes).expect("user-data is written");
        let event = tokio::time::timeout(PATIENCE, feed.events.recv()).await.expect("an event comes");
        let Some(FeedEvent::Upsert { record, .. }) = event else { panic!("{event:?}") };
        let payload = record.user_data.as_ref().expect("user-data is there");
        assert_eq!(payload.bytes().as_deref(), Some(bytes));
    }
}

/// The full record, with a service account's token and a role's keys in files.
fn with_credentials(token: &str, keys: &str) -> String {
    let mut record: serde_json::Value = serde_yaml::from_str(FULL).expect("the record is YAML");
    record["credentials"] = serde_json::json!({
        "iam": { "role": "app", "source": { "file": keys } },
        "service_account": { "name": "web", "token": {
            "source": { "file": token }, "expires": "2030-01-01T00:00:00Z",
        } },
    });
    record.to_string()
}

/// Writes a token as Kubernetes does: all files of a volume change at once.
fn rotate(volume: &Path, round: usize, token: &str) {
    let (data, draft) = (format!("..{round}"), volume.join("..data_tmp"));
    fs::create_dir_all(volume.join(&data)).expect("a directory is made");
    fs::write(volume.join(&data).join("token"), token).expect("a token is written");
    symlink(&data, &draft).expect("a link is made");
    fs::rename(draft, volume.join("..data")).expect("the link is renamed");
    if !volume.join("token").exists() {
        symlink("..data/token", volume.join("token")).expect("a link is made");
    }
}

impl Feed {
    /// The token of the next published record.
    async fn token(&mut self) -> Option<String> {
        loop {
            let event = tokio::time::timeout(PATIENCE, self.events.recv()).await.expect("an event comes");
            let record = match event.expect("the feed runs") {
                FeedEvent::Upsert { record, .. } => record,
                FeedEvent::Synced => continue,
                other => panic!("{other:?}"),
            };
            let account = record.credentials.service_account.as_ref().expect("an account");
            let token = account.token.as_ref().expect("a token");
            return token.text.as_ref().map(|text| text.expose().to_owned());
        }
    }

    /// Waits until the token has this value.
    async fn until_token(&mut self, wanted: Option<&str>) {
        while self.token().await.as_deref() != wanted {}
    }
}

#[tokio::test]
async fn a_token_is_read_again_when_kubernetes_rotates_it() {
    let dir = dir();
    let volume = dir.path().join("volumes").join("sa");
    put(dir.path(), "a.json", &with_credentials("volumes/sa/token", "keys"));
    let mut feed = Feed::start(dir.path());
    assert_eq!(feed.token().await, None, "the VM is served without");
    for round in 0..3 {
        let token = format!("token-{round}");
        rotate(&volume, round, &token);
        feed.until_token(Some(&token)).await;
    }
    fs::rename(&volume, dir.path().join("volumes").join("gone")).expect("the volume is renamed");
    feed.until_token(None).await;
    rotate(&volume, 9, "back");
    feed.until_token(Some("back")).await;
    fs::remove_dir_all(dir.path().join("volumes")).expect("the volumes are removed");
    feed.until_token(None).await;
    rotate(&volume, 0, "again");
    feed.until_token(Some("again")).await;
}

#[tokio::test]
async fn an_unreadable_credential_is_reported_once() {
    let dir = dir();
    put(dir.path(), "a.json", &with_credentials("token", "keys"));
    let mut feed = Feed::start(dir.path());
    feed.expect(&["+a.json=web-1", "."]).await;
    put(dir.path(), "a.json", &with_credentials("token", "keys"));
    put(dir.path(), "b.yaml", FULL);
    feed.expect(&["+b.yaml=web-1"]).await;
    put(dir.path(), "keys", "no JSON");
    feed.expect(&["+a.json=web-1"]).await;
}

#[test]
fn a_warning_names_the_credentials_file_but_not_its_content() {
    let (dir, outside) = (dir(), dir());
    fs::write(outside.path().join("secret"), "hunter2").expect("a file is written");
    symlink(outside.path().join("secret"), dir.path().join("token")).expect("a link is made");
    put(dir.path(), "keys", r#"{"AccessKeyId": "hunter2", "SecretAccessKey": ["hunter2"]}"#);
    put(dir.path(), "a.json", &with_credentials("token", "keys"));
    let loaded = load(dir.path(), "a.json", &RecordLimits::DEFAULT).expect("the record is there");
    let (record, warnings) = loaded.record.expect("the record is served");
    assert!(record.credentials.iam.expect("a role").access_key_id.is_none());
    let warnings: Vec<String> = warnings.iter().map(ToString::to_string).collect();
    let [keys, token] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(
        keys.contains("credentials.iam.source.file") && keys.contains("/keys: expected JSON with"),
        "{keys}"
    );
    assert!(token.contains("credentials.service_account.token.source.file"), "{token}");
    assert!(token.contains("expected a file inside the record's directory"), "{token}");
    assert!(warnings.iter().all(|warning| !warning.contains("hunter2")), "{warnings:?}");
}

#[test]
fn a_source_cannot_show_other_files_of_the_node() {
    let (dir, outside) = (dir(), dir());
    fs::write(outside.path().join("secret"), "secret").expect("a file is written");
    symlink(outside.path().join("secret"), dir.path().join("link")).expect("a link is made");
    symlink(outside.path(), dir.path().join("way")).expect("a link is made");
    for file in ["link", "way/secret", "../secret", "/etc/hostname"] {
        put(dir.path(), "a.yaml", &sourced(file));
        let loaded = load(dir.path(), "a.yaml", &RecordLimits::DEFAULT).expect("the record is there");
        let error = loaded.record.expect_err(file).to_string();
        assert!(error.contains("inside"), "{file}: {error}");
    }
}

#[test]
fn files_too_large_or_not_regular_are_refused_by_name() {
    let dir = dir();
    let refusal = |name: &str| {
        let loaded = load(dir.path(), name, &RecordLimits::DEFAULT).expect("the file is there");
        loaded.record.expect_err("it is refused").to_string()
    };
    put(dir.path(), "large.yaml", &"#".repeat((4 << 20) + 1));
    assert!(refusal("large.yaml").contains("at most 4194304 bytes"), "{}", refusal("large.yaml"));
    put(dir.path(), "a.yaml", &sourced("big"));
    fs::write(dir.path().join("big"), vec![b'x'; 65_537]).expect("user-data is written");
    assert!(refusal("a.yaml").contains("at most 65536 bytes of user_data"), "{}", refusal("a.yaml"));
    fs::write(dir.path().join("big"), vec![b'x'; 65_536]).expect("user-data is written");
    assert!(load(dir.path(), "a.yaml", &RecordLimits::DEFAULT).expect("the record is there").record.is_ok());
    fs::create_dir(dir.path().join("d.yaml")).expect("a directory is made");
    assert!(
        refusal("d.yaml").contains("a directory, not a regular file; remove it"),
        "{}",
        refusal("d.yaml")
    );
    rustix::fs::mknodat(
        rustix::fs::CWD,
        dir.path().join("f.yaml"),
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .expect("a FIFO is made");
    assert!(refusal("f.yaml").contains("a FIFO, not a regular file"), "{}", refusal("f.yaml"));
    let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("s.yaml")).expect("a socket");
    assert!(refusal("s.yaml").contains("a device or a socket, not a regular file"), "{}", refusal("s.yaml"));
    assert!(load(dir.path(), "none.yaml", &RecordLimits::DEFAULT).is_none());
}

/// The full record with keys of a file beside it.
fn with_keys_in(file: &str) -> String {
    let text = named("web-1");
    let (before, rest) = text.split_once("\n  iam:").expect("the full record has keys");
    let after: Vec<_> = rest.lines().skip(1).skip_while(|line| line.starts_with("    ")).collect();
    format!("{before}\n  iam: {{role: app, source: {{file: {file}}}}}\n{}\n", after.join("\n"))
}

#[test]
fn modes_more_open_than_0640_are_noticed_of_the_record_and_of_its_sources() {
    let dir = dir();
    put(dir.path(), "a.yaml", &with_keys_in("a.iam"));
    put(dir.path(), "a.iam", AWS_KEYS);
    for name in ["a.yaml", "a.iam"] {
        for (mode, is_open) in [(0o600, false), (0o640, false), (0o400, false), (0o644, true), (0o660, true)]
        {
            for other in ["a.yaml", "a.iam"] {
                let mode = if other == name { mode } else { 0o600 };
                let permissions = fs::Permissions::from_mode(mode);
                fs::set_permissions(dir.path().join(other), permissions).expect("the mode is set");
            }
            let loaded = load(dir.path(), "a.yaml", &RecordLimits::DEFAULT).expect("the record is there");
            let found: Vec<_> = loaded
                .open_files
                .iter()
                .filter_map(|(path, mode)| Some((path.file_name()?.to_str()?, *mode)))
                .collect();
            let expected = if is_open { vec![(name, mode)] } else { vec![] };
            assert_eq!(found, expected, "{name} {mode:o}");
        }
    }
}

#[tokio::test]
async fn a_missing_credential_is_a_problem_while_it_lasts() {
    let dir = dir();
    put(dir.path(), "a.yaml", &with_keys_in("a.iam"));
    let (tx, events) = mpsc::channel(4);
    let publisher = Publisher::from(tx);
    let outage = publisher.outage();
    tokio::spawn(watch(dir.path().to_owned(), RecordLimits::DEFAULT, publisher));
    let mut feed = Feed { events };
    feed.expect(&["+a.yaml=web-1", "."]).await;
    let problems = outage.problems();
    assert!(
        matches!(&problems[..], [one] if one.starts_with("a.yaml: the VM gets no credential: ") && one.contains("a.iam")),
        "{problems:?}"
    );
    put(dir.path(), "a.iam", "no JSON");
    feed.expect(&["+a.yaml=web-1"]).await;
    assert!(outage.problems().concat().contains("`AccessKeyId`"), "{:?}", outage.problems());
    put(dir.path(), "a.iam", AWS_KEYS);
    feed.expect(&["+a.yaml=web-1"]).await;
    assert_eq!(outage.problems(), [""; 0]);
    fs::remove_file(dir.path().join("a.iam")).expect("removed");
    feed.expect(&["+a.yaml=web-1"]).await;
    assert_eq!(outage.problems().len(), 1);
    fs::remove_file(dir.path().join("a.yaml")).expect("removed");
    feed.expect(&["-a.yaml"]).await;
    assert_eq!(outage.problems(), [""; 0]);
}

#[tokio::test]
async fn records_beyond_the_limit_are_refused_and_the_others_served() {
    let dir = dir();
    for name in ["a.yaml", "b.yaml", "c.yaml"] {
        put(dir.path(), name, FULL);
    }
    let (tx, events) = mpsc::channel(4);
    tokio::spawn(watch_at_most(2, dir.path().to_owned(), RecordLimits::DEFAULT, tx.into()));
    let mut feed = Feed { events };
    feed.expect(&["+a.yaml=web-1", "+b.yaml=web-1", "!c.yaml", "."]).await;
}

#[tokio::test]
async fn a_missing_directory_is_an_error_at_the_start() {
    let missing = dir().path().join("missing");
    let (tx, _events) = mpsc::channel(4);
    let error =
        watch(missing.clone(), RecordLimits::DEFAULT, tx).await.expect_err("there is nothing to watch");
    assert!(matches!(&error, FeedError::Io { path, .. } if *path == missing), "{error}");
    assert!(names(&missing).is_err());
}

#[tokio::test]
async fn an_outage_ends_once_the_directory_is_read() {
    let dir = dir();
    let (tx, mut events) = mpsc::channel(4);
    let tx = Publisher::from(tx);
    // The agent says so while it starts from its snapshot and the directory cannot be read yet.
    tx.set_outage(Some("it is not mounted".into()));
    let outage = tx.outage();
    tokio::spawn(watch(dir.path().to_owned(), RecordLimits::DEFAULT, tx));
    assert!(matches!(events.recv().await, Some(FeedEvent::Synced)));
    assert_eq!(outage.reason(), None);
}

#[tokio::test]
async fn the_feed_ends_once_its_receiver_is_dropped() {
    let dir = dir();
    let (tx, mut events) = mpsc::channel(4);
    let feed = tokio::spawn(watch(dir.path().to_owned(), RecordLimits::DEFAULT, tx));
    assert!(matches!(events.recv().await, Some(FeedEvent::Synced)));
    drop(events);
    let ended = tokio::time::timeout(PATIENCE, feed).await.expect("it ends").expect("it does not panic");
    assert!(ended.is_ok());
}

/// A record of a VM with user-data of this many bytes.
fn large(name: &str, bytes: usize) -> String {
    let user_data = name.repeat(bytes / name.len());
    format!(
        "schema: vmrecord/1\ngeneration: 1\nvm: {{uuid: 7c0f1a52-3b5e-4d1a-9d2c-0f5e8a1b2c3d, name: {name}, \
         project: {{id: p, number: 1, account: '000000000000'}}}}\nhostname: {{short: {name}}}\n\
         placement: {{region: r, zone: z}}\nuser_data: {{text: '{user_data}'}}\n"
    )
}

#[tokio::test]
async fn a_record_without_memory_is_refused_until_another_frees_it() {
    const LARGE: usize = 50_000;
    let parsed = Record::parse("a", &large("a", LARGE)).expect("a good record").0;
    let room = MemoryBudget::new(Weight::of(&parsed).alone() * 3 / 2);
    let dir = dir();
    put(dir.path(), "a.yaml", &large("a", LARGE));
    put(dir.path(), "b.yaml", &large("b", LARGE));
    let (tx, events) = mpsc::channel(4);
    let publisher = Publisher::new(tx, Arc::clone(&room), RecordSource::File);
    tokio::spawn(watch(dir.path().to_owned(), RecordLimits::DEFAULT, publisher));
    let mut feed = Feed { events };
    feed.expect(&["+a.yaml=a", "!b.yaml", "."]).await;
    fs::remove_file(dir.path().join("a.yaml")).expect("removed");
    feed.expect(&["-a.yaml"]).await;
    room.give_back(&RecordId::new(RecordSource::File, "a.yaml"));
    feed.expect(&["+b.yaml=b"]).await;
    // A larger version of a served record is refused, but the smaller one after it is not.
    put(dir.path(), "b.yaml", &large("b", 4 * LARGE / 3 + LARGE));
    feed.expect(&["!b.yaml"]).await;
    put(dir.path(), "b.yaml", &large("b", LARGE / 2));
    feed.expect(&["+b.yaml=b"]).await;
}

#[tokio::test]
async fn each_departed_record_admits_one_refused_record() {
    const LARGE: usize = 50_000;
    const SERVED: usize = 4;
    let parsed = Record::parse("a", &large("a", LARGE)).expect("a good record").0;
    let room = MemoryBudget::new(Weight::of(&parsed).alone() * SERVED + 1_000);
    let dir = dir();
    let names: Vec<String> = ('a'..='h').map(String::from).collect();
    for name in &names {
        put(dir.path(), &format!("{name}.yaml"), &large(name, LARGE));
    }
    let (tx, events) = mpsc::channel(16);
    tokio::spawn(watch(
        dir.path().to_owned(),
        RecordLimits::DEFAULT,
        Publisher::new(tx, Arc::clone(&room), RecordSource::File),
    ));
    let mut feed = Feed { events };
    for name in &names[..SERVED] {
        feed.expect(&[&format!("+{name}.yaml={name}")]).await;
    }
    for name in &names[SERVED..] {
        feed.expect(&[&format!("!{name}.yaml")]).await;
    }
    feed.expect(&["."]).await;
    for (gone, comes) in names[..SERVED].iter().zip(&names[SERVED..]) {
        room.give_back(&RecordId::new(RecordSource::File, &format!("{gone}.yaml")));
        feed.expect(&[&format!("+{comes}.yaml={comes}")]).await;
    }
}
