declare const library: any;
export default library;
export const Terminal: any, FitAddon: any;
