//! Objects of other projects match the schemas those projects publish: in manifests, in examples and in the API server
//! of the tests. An unknown field is refused at any place.

use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use support::apiserver::ApiServer;
use support::schema::Schemas;

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn documents(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_yaml::from_multiple(&text).expect("YAML")
}

/// Collects every YAML file below a directory.
fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("listed") {
        let path = entry.expect("an entry").path();
        match path.extension().and_then(|end| end.to_str()) {
            _ if path.is_dir() => files(&path, found),
            Some("yaml") => found.push(path),
            _ => {}
        }
    }
}

#[test]
fn manifests_and_examples_match_the_schemas_of_other_projects() {
    let mut paths = Vec::new();
    for directory in ["deploy/kustomize", "deploy/examples"] {
        files(&top().join(directory), &mut paths);
    }
    let mut kinds = BTreeSet::new();
    for path in paths {
        for object in documents(&path) {
            if Schemas::published().has(&object) {
                let found = Schemas::published().findings(&object);
                assert!(found.is_empty(), "{}: {found:?}", path.display());
                kinds.insert(object["kind"].as_str().unwrap_or_default().to_owned());
            }
        }
    }
    let expected = [
        "Certificate",
        "Issuer",
        "Plugin",
        "PodMonitor",
        "PrometheusRule",
        "SecurityContextConstraints",
        "VirtualMachine",
        "VirtualMachineInstance",
    ];
    assert_eq!(kinds, expected.map(ToOwned::to_owned).into());
}

/// Applies a JSON merge patch (RFC 7386), as the tables of the feed do.
fn merge(into: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        if !patch.is_null() {
            *into = patch.clone();
        }
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    for (key, value) in patch {
        match value {
            Value::Null => _ = into.as_object_mut().expect("an object").remove(key),
            value => merge(&mut into[key], value),
        }
    }
}

#[test]
fn the_vmis_of_the_feeds_tables_match_kubevirts_schema() {
    let fixtures = top().join("metadata-user/feed/src/kubevirt/translate/fixtures");
    let tables = documents(&fixtures.join("tables.yaml")).remove(0);
    let lines = |table: &str| tables[table].as_array().expect("a table").clone();
    let (bindings, sources, states) = (lines("bindings"), lines("sources"), lines("states"));
    let mut cases = 0;
    let mut unpublished = BTreeSet::new();
    for binding in &bindings {
        for source in &sources {
            for state in &states {
                let mut vmi = tables["base"]["vmi"].clone();
                [binding, source, state].iter().for_each(|line| merge(&mut vmi, &line["vmi"]));
                unpublished.extend(Schemas::published().findings(&vmi));
                cases += 1;
            }
        }
    }
    assert!(cases >= 300, "{cases} cases");
    // No KubeVirt release has VEP 100 yet; its text is in the `kubevirt/enhancements` repository.
    let of_vep_100 = ["metaData", "metaDataSecretRef"]
        .map(|field| format!(".spec.volumes[0].cloudInitNoCloud.{field} is not in the schema"));
    assert_eq!(unpublished, of_vep_100.into());
    let vmi = documents(&fixtures.join("vmi.json")).remove(0);
    assert_eq!(Schemas::published().findings(&vmi), [""; 0]);
}

/// Collects the JSON pointers of all mappings of an object, except mappings with keys that the user chooses.
fn mappings(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            found.push(path.to_owned());
            for (name, inner) in fields {
                if !["annotations", "labels", "matchLabels", "requests", "limits", "activePods"]
                    .contains(&&**name)
                {
                    mappings(inner, &format!("{path}/{name}"), found);
                }
            }
        }
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items.for_each(|(at, inner)| mappings(inner, &format!("{path}/{at}"), found));
        }
        _ => {}
    }
}

#[test]
fn an_unknown_field_is_refused_at_any_place() {
    let mut paths = Vec::new();
    files(&top().join("deploy"), &mut paths);
    paths.push(top().join("metadata-user/feed/src/kubevirt/translate/fixtures/vmi.json"));
    let mut places = 0;
    // The chart's templates are YAML only after rendering.
    for path in
        paths.into_iter().filter(|path| !path.components().any(|part| part.as_os_str() == "templates"))
    {
        for object in documents(&path).into_iter().filter(|object| Schemas::published().has(object)) {
            let mut pointers = Vec::new();
            mappings(&object, "", &mut pointers);
            for pointer in pointers {
                let mut wrong = object.clone();
                let there = wrong.pointer_mut(&pointer).expect("a mapping");
                there["unknownField"] = json!(1);
                let found = Schemas::published().findings(&wrong);
                let is_right = found.len() == 1 && found[0].ends_with(".unknownField is not in the schema");
                assert!(is_right, "{} at {pointer}: {found:?}", path.display());
                places += 1;
            }
        }
    }
    assert!(places > 100, "{places} places");
}

#[test]
#[should_panic(expected = ".spec.domain.devices.interface is not in the schema")]
fn the_api_server_of_the_tests_refuses_fields_unknown_to_kubevirt() {
    let server = ApiServer::start().expect("a server");
    server.put(json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance",
        "metadata": {"name": "a", "namespace": "n"}, "spec": {"domain": {"devices": {"interface": []}}}}));
}
