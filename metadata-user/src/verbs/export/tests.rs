use super::{ImageFormat, run};
use hadris_iso::sync::read::IsoImage;
use metadata_content::record::RecordLimits;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Cursor;
use std::os::unix::fs::PermissionsExt as _;

const FULL: &str = include_str!("../../../../tests/vectors/record.yaml");
const USER_DATA: &str = "#cloud-config\nruncmd:\n- [touch, /run/ud-ok]\n";

/// The image of a record.
fn image(form: ImageFormat, record: &str) -> anyhow::Result<Vec<u8>> {
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("web.yaml"), record)?;
    std::fs::set_permissions(dir.path().join("web.yaml"), std::fs::Permissions::from_mode(0o640))?;
    let images = dir.path().join("images");
    run(form, &dir.path().join("web.yaml"), &RecordLimits::DEFAULT, &images, &mut Vec::new())?;
    let path = images.join("web.iso");
    let mode = std::fs::metadata(&path)?.permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "it holds the record's secrets");
    Ok(std::fs::read(path)?)
}

/// Every file of an image, by path.
fn files(image: Vec<u8>) -> BTreeMap<String, Vec<u8>> {
    let image = IsoImage::open(Cursor::new(image)).expect("an image");
    let mut files = BTreeMap::new();
    let mut dirs = vec![(String::new(), image.root_dir().dir_ref())];
    while let Some((path, dir)) = dirs.pop() {
        for entry in image.open_dir(dir).entries() {
            let entry = entry.expect("an entry");
            if entry.is_special() {
                continue;
            }
            let path = format!("{path}/{}", entry.display_name());
            match entry.as_dir_ref(&image) {
                Ok(below) if entry.is_directory() => dirs.push((path, below)),
                _ => drop(files.insert(path, image.read_file(&entry).expect("a file"))),
            }
        }
    }
    files
}

fn label(image: &[u8]) -> String {
    // The primary volume descriptor (ECMA-119 §8.4.7).
    String::from_utf8_lossy(&image[16 * 2048 + 40..16 * 2048 + 72]).trim_end().to_owned()
}

#[test]
fn a_config_drive_holds_what_http_answers() {
    let image = image(ImageFormat::ConfigDrive, FULL).expect("an image");
    assert_eq!(label(&image), "config-2");
    let files = files(image);
    let text = |path: &str| String::from_utf8_lossy(files.get(path).expect(path)).into_owned();
    for version in ["latest", "2012-08-10", "2018-08-27"] {
        assert_eq!(text(&format!("/openstack/{version}/user_data")), USER_DATA);
        let meta_data: Value = serde_json::from_str(&text(&format!("/openstack/{version}/meta_data.json")))
            .expect("meta_data.json is JSON");
        assert_eq!(meta_data["hostname"], "web-1.example.internal");
    }
    let ec2: Value = serde_json::from_str(&text("/ec2/latest/meta-data.json")).expect("JSON");
    assert_eq!(ec2["instance-id"], "i-0f5e8a1b2c3d4e5f6");
    assert_eq!(ec2["placement"]["availability-zone"], "local-a");
    assert!(
        ec2["public-keys"]["0"]["openssh-key"].as_str().is_some_and(|key| key.starts_with("ssh-ed25519 "))
    );
    assert_eq!(text("/ec2/2009-04-04/user-data"), USER_DATA);
    assert!(!ec2.to_string().contains("sk-example"), "credentials need a token");
}

#[test]
fn a_nocloud_seed_has_a_user_data_file_even_without_user_data() {
    let bare =
        FULL.lines().filter(|line| !line.starts_with("user_data:") && !line.starts_with("vendor_data:"));
    let bare: String = bare.map(|line| format!("{line}\n")).collect();
    for (record, user_data, others) in [
        (FULL, USER_DATA, &["/meta-data", "/network-config", "/user-data", "/vendor-data"][..]),
        (bare.as_str(), "", &["/meta-data", "/network-config", "/user-data"][..]),
    ] {
        let image = image(ImageFormat::NoCloud, record).expect("an image");
        assert_eq!(label(&image), "cidata");
        let files = files(image);
        assert_eq!(files.keys().collect::<Vec<_>>(), others);
        assert_eq!(files["/user-data"], user_data.as_bytes());
    }
}

#[test]
fn a_record_that_does_not_serve_the_dialect_is_refused() {
    let record = FULL.replacen("absent_seed: 204", "dialects: [kubevirt]", 1);
    for form in [ImageFormat::NoCloud, ImageFormat::ConfigDrive] {
        let error = image(form, &record).expect_err("nothing to write");
        assert!(format!("{error:#}").contains("add it to serve.dialects"), "{error:#}");
    }
}
