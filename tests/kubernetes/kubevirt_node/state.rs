//! Files that the agent writes on a KubeVirt node, and that they contain no secret.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::ensure;
use metadata_content::record::Record;
use metadata_content::source::RecordSource;
use metadata_feed::registry::RecordId;
use metadata_feed::snapshot;
use support::pod::Plugin;
use support::record::Identity;

use super::node::{Node, eventually_gets, may_run, wait_for};

/// The beginning of every secret in this test.
const CANARY: &str = "CANARY";

/// The files below a directory that contain the canary, in plain or in base64 at any offset.
fn leaks(directory: &Path) -> Vec<String> {
    use base64::Engine as _;
    let encoded = (0..3).map(|offset| {
        let text =
            base64::engine::general_purpose::STANDARD_NO_PAD.encode(format!("{}{CANARY}", &"   "[..offset]));
        // The first and last characters depend on the bytes beside the canary.
        text[(offset * 4usize).div_ceil(3)..text.len() - 1].to_owned()
    });
    let forms: Vec<String> = encoded.chain([CANARY.to_owned()]).collect();
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(leaks(&path));
            continue;
        }
        let bytes = fs::read(&path).expect("a file");
        let text = String::from_utf8_lossy(&bytes);
        if forms.iter().any(|form| text.contains(form)) {
            found.push(path.display().to_string());
        }
    }
    found
}

#[test]
fn no_file_of_the_state_directory_has_a_secret_of_a_kubevirt_record() {
    if !may_run() {
        return;
    }
    let node = Node::new();
    let state = node.path("state");
    // An earlier release wrote records with their secrets into the snapshot.
    fs::create_dir(&state).expect("a directory");
    let mut former: serde_json::Value = serde_json::from_str(&Identity::of(7).record(1)).expect("a record");
    former["user_data"]["text"] = format!("#cloud-config\n# {CANARY}-former\n").into();
    let (former, _) = Record::parse("former.json", &former.to_string()).expect("a record");
    let id = RecordId::new(RecordSource::Kubevirt, "shop/former");
    snapshot::write(&state.join(snapshot::FILE), &[(id, Arc::new(former))], &snapshot::Origins::new())
        .expect("written");
    assert_eq!(leaks(&state).len(), 1, "the test finds what it looks for");

    let agent = node.agent();
    let mut pod = node.pod(1);
    pod.write(Plugin::Projected, "imds-token", &[("token", format!("{CANARY}.e30.c2ln").as_bytes())]);
    let guest = pod.run(&format!("#cloud-config\n# {CANARY}-user-data\n"));
    eventually_gets(&agent, &guest, "/v1/user-data", CANARY);
    wait_for(&agent, "the kept file", || {
        ensure!(node.saved_vmis().contains(&pod.identity.hostname), "the VMI is not on disk");
        Ok(())
    });
    wait_for(&agent, "a snapshot without secrets", || {
        ensure!(leaks(&state).is_empty(), "{:?}", leaks(&state));
        Ok(())
    });
    assert!(agent.stop().expect("stopped").success());
    assert_eq!(leaks(&state), Vec::<String>::new());
}
