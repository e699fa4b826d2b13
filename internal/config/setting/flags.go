package setting

import "github.com/spf13/pflag"

// Flags are the flags of settings.
type Flags struct {
	given map[string]*flagValue
}

// AddFlags registers a flag for each setting. A flag's value is checked, and the variable set, as it is parsed.
func AddFlags(fs *pflag.FlagSet, settings []Setting) *Flags {
	f := &Flags{given: map[string]*flagValue{}}
	for _, s := range settings {
		v := &flagValue{setting: s, text: s.Text()}
		f.given[s.Key] = v
		flag := fs.VarPF(v, s.Flag(), "", s.Doc)
		if s.Kind() == "bool" {
			flag.NoOptDefVal = "true"
		}
	}
	return f
}

// Lookup returns the text of a key's flag, and whether the flag was given.
func (f *Flags) Lookup(key string) (string, bool) {
	if v, ok := f.given[key]; ok && v.isSet {
		return v.text, true
	}
	return "", false
}

// flagValue checks a flag as it is parsed, so that the usage error is at once.
type flagValue struct {
	setting Setting
	text    string
	isSet   bool
}

// String is the default until the flag is given.
func (v *flagValue) String() string { return v.text }

// Type is what the help calls the value.
func (v *flagValue) Type() string { return v.setting.Kind() }

// Set checks and takes a value; a list given twice is joined.
func (v *flagValue) Set(text string) error {
	if err := v.setting.Set(text); err != nil {
		return err
	}
	if v.isSet && v.setting.Kind() == "list" {
		text = v.text + "," + text
	}
	v.text, v.isSet = text, true
	return nil
}
