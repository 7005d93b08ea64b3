//! What the VM tier's guest gives every test: a kernel, RDMA devices by name, a libibverbs that opens them and registers
//! memory. Nothing here uses hmem: when these fail, the guest is at fault.

#![cfg(test)]

use std::{
    env,
    ffi::{CStr, c_char, c_int, c_void},
    fs, ptr,
};

use libloading::{Library, Symbol};

type GetDeviceList = unsafe extern "C" fn(*mut c_int) -> *mut *mut c_void;
type FreeDeviceList = unsafe extern "C" fn(*mut *mut c_void);
type GetDeviceName = unsafe extern "C" fn(*mut c_void) -> *const c_char;
type OpenDevice = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
type Close = unsafe extern "C" fn(*mut c_void) -> c_int;
type AllocPd = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
type RegMr = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int) -> *mut c_void;

const IBV_ACCESS_LOCAL_WRITE: c_int = 1;
/// Offset of `lkey` in `struct ibv_mr` on 64-bit machines (`infiniband/verbs.h`).
const MR_LKEY: usize = 36;

fn devices_asked_for() -> Vec<String> {
    ["HMEM_VERBS_DEVICE", "HMEM_VERBS_SECOND_DEVICE"]
        .map(|variable| env::var(variable).unwrap_or_else(|_| panic!("{variable} is not set")))
        .to_vec()
}

fn verbs() -> Library {
    // SAFETY: libibverbs' initialisers have no preconditions.
    unsafe { Library::new("libibverbs.so.1") }.expect("libibverbs loads")
}

fn symbol<'l, F>(library: &'l Library, name: &str) -> Symbol<'l, F> {
    // SAFETY: every caller names a function type that is the C declaration of that symbol.
    unsafe { library.get(name) }.unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn the_kernel_is_the_one_asked_for() {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let asked = env::var("HMEM_VM_KERNEL").expect("HMEM_VM_KERNEL is set");
    assert_eq!(release.trim(), asked);
}

#[test]
fn sysfs_shows_the_devices_with_an_active_port() {
    for device in devices_asked_for() {
        let state = fs::read_to_string(format!("/sys/class/infiniband/{device}/ports/1/state")).unwrap();
        assert_eq!(state.trim(), "4: ACTIVE", "{device}");
    }
}

#[test]
fn an_ordinary_user_may_open_the_device() {
    use std::os::unix::fs::MetadataExt;
    assert_eq!(fs::metadata("/dev/infiniband/uverbs0").unwrap().mode() & 0o666, 0o666);
}

#[test]
fn every_device_registers_and_releases_a_page() {
    let library = verbs();
    let get_device_list: Symbol<'_, GetDeviceList> = symbol(&library, "ibv_get_device_list");
    let free_device_list: Symbol<'_, FreeDeviceList> = symbol(&library, "ibv_free_device_list");
    let get_device_name: Symbol<'_, GetDeviceName> = symbol(&library, "ibv_get_device_name");
    let open_device: Symbol<'_, OpenDevice> = symbol(&library, "ibv_open_device");
    let close_device: Symbol<'_, Close> = symbol(&library, "ibv_close_device");
    let alloc_pd: Symbol<'_, AllocPd> = symbol(&library, "ibv_alloc_pd");
    let dealloc_pd: Symbol<'_, Close> = symbol(&library, "ibv_dealloc_pd");
    let reg_mr: Symbol<'_, RegMr> = symbol(&library, "ibv_reg_mr");
    let dereg_mr: Symbol<'_, Close> = symbol(&library, "ibv_dereg_mr");

    let mut page = vec![0_u8; 4096];
    // SAFETY: the calls follow verbs(3): each object is released once, after what was made from it, and `page` outlives
    // its registration.
    unsafe {
        let mut count = 0;
        let list = get_device_list(&mut count);
        assert!(!list.is_null(), "ibv_get_device_list: {}", std::io::Error::last_os_error());
        let mut seen = Vec::new();
        for index in 0..usize::try_from(count).unwrap() {
            let device = *list.add(index);
            let name = CStr::from_ptr(get_device_name(device)).to_str().unwrap().to_owned();
            let context = open_device(device);
            assert_ne!(context, ptr::null_mut(), "ibv_open_device {name}");
            let domain = alloc_pd(context);
            assert_ne!(domain, ptr::null_mut(), "ibv_alloc_pd {name}");
            let region = reg_mr(domain, page.as_mut_ptr().cast(), page.len(), IBV_ACCESS_LOCAL_WRITE);
            assert_ne!(region, ptr::null_mut(), "ibv_reg_mr {name}: {}", std::io::Error::last_os_error());
            let lkey = region.byte_add(MR_LKEY).cast::<u32>().read();
            println!("{name}: lkey {lkey:#x}");
            assert_ne!(lkey, 0);
            assert_eq!(dealloc_pd(domain), libc::EBUSY, "a domain with a region in it");
            assert_eq!(dereg_mr(region), 0);
            assert_eq!(dealloc_pd(domain), 0);
            assert_eq!(close_device(context), 0);
            seen.push(name);
        }
        free_device_list(list);
        seen.sort();
        assert_eq!(seen, devices_asked_for());
    }
}

/// What the tier itself must notice: run by `tests/vm/check`, by name.
mod misbehaviour {
    use std::{fs, io::Write, process, thread, time::Duration};

    #[test]
    #[ignore = "fails"]
    fn an_assertion_fails() {
        panic!("on purpose");
    }

    #[test]
    #[ignore = "dies"]
    fn the_process_dies_in_the_middle_of_a_line() {
        print!("half a line");
        std::io::stdout().flush().unwrap();
        process::abort();
    }

    #[test]
    #[ignore = "never ends"]
    fn a_test_hangs() {
        thread::sleep(Duration::from_hours(1));
    }

    #[test]
    #[ignore = "takes the kernel down"]
    fn the_kernel_panics() {
        fs::write("/proc/sysrq-trigger", "c").unwrap();
    }

    #[test]
    #[ignore = "takes the machine down"]
    fn the_machine_stops() {
        fs::write("/proc/sysrq-trigger", "o").unwrap();
        thread::sleep(Duration::from_hours(1));
    }

    #[test]
    #[ignore = "fills the console"]
    fn the_kernel_talks_over_the_results() {
        let mut kernel_log = fs::File::options().write(true).open("/dev/kmsg").unwrap();
        for line in 0..2000 {
            writeln!(kernel_log, "<0>noise {line}").unwrap();
            println!("result {line}");
        }
    }
}
